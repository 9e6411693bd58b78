"""What is deployed and how it stands: queues, runs, events that matter, as tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import TextIO

from kubernetes.utils.quantity import parse_quantity

from local.errors import Problem
from local.progress import clock
from local.view.cluster import RUN, Cluster, Obj, RunObjects, event_time, holds, moment
from local.view.goodput import account, share_of_steps
from local.view.ledger import Ledger
from local.view.narrate import situation, size
from local.view.store import Store
from local.view.waiting import decide, notable

_LAST_EVENTS = 8
_LAST_DRILLS = 3
_BYTES_FROM = Decimal(2**20)


def status(kubeconfig: str | Path, store: Store, out: TextIO | None = None) -> int:
    """Print the tables; return 0, whether or not anything is deployed."""
    screen = out or sys.stdout
    cluster = Cluster(kubeconfig)
    queues, entries = cluster.cluster_queues(), cluster.runs()
    by_run: dict[str, dict[str, RunObjects]] = {}
    for entry in entries:
        by_run.setdefault(entry.name, {})[entry.role] = entry
    ledgers = {run: Ledger.merge(_stored(store, run, screen), cluster.said(by_run[run].values())) for run in by_run}
    now = time.time()
    for block in (queue_table(queues), run_table(by_run, ledgers, now), drill_table(cluster.drills(), now), event_table(entries, now)):
        if block:
            print("\n".join([*block, ""]), file=screen)
    return 0


def queue_table(queues: Sequence[Obj]) -> list[str]:
    """Return quota and use of every queue, a line a resource."""
    rows = []
    for queue in queues:
        status_ = queue.get("status") or {}
        used = {
            (flavor["name"], one["name"]): one.get("total", "0")
            for flavor in status_.get("flavorsUsage") or []
            for one in flavor.get("resources") or []
        }
        pending, admitted = str(status_.get("pendingWorkloads", 0)), str(status_.get("admittedWorkloads", 0))
        quotas = [
            (flavor["name"], one["name"], one["nominalQuota"])
            for group in (queue.get("spec") or {}).get("resourceGroups") or []
            for flavor in group["flavors"]
            for one in flavor["resources"]
        ]
        for index, (flavor, resource, nominal) in enumerate(quotas):
            first = (queue["metadata"]["name"], admitted, pending) if index == 0 else ("", "", "")
            taken = quantity(used.get((flavor, resource), "0"), resource)
            rows.append((first[0], flavor, resource, quantity(nominal, resource), taken, *first[1:]))
    return table(("queue", "flavor", "resource", "quota", "used", "running", "pending"), rows) if rows else []


def run_table(runs: dict[str, dict[str, RunObjects]], ledgers: dict[str, Ledger], now: float) -> list[str]:
    """Return where every run stands, and the reason of each that stands still."""
    if not runs:
        return ["no run is deployed; make up"]
    rows, reasons = [], []
    for name, objects in runs.items():
        ledger = ledgers[name]
        stage, decisive = decide(objects, ledger)
        created = moment(decisive.job["metadata"]["creationTimestamp"]) if decisive else None
        state = ledger.state
        rows.append(
            (
                name,
                decisive.namespace if decisive else "",
                situation(stage, ledger),
                f"{state.step}/{state.steps}" if state.steps else "-",
                f"{state.loss:.3f}" if state.loss is not None else "-",
                str(len(ledger.checkpoints)),
                str(max((one.step for one in ledger.checkpoints if one.good is not None), default="-")),
                share_of_steps(account(ledger)) or "-",
                clock(now - created) if created else "-",
            )
        )
        said = ledger.error.text("message") if ledger.error and stage.name == "failed" else stage.reason
        reasons += [f"  {name}: {said}"] if said else []
    return [*table(("run", "namespace", "state", "step", "loss", "checkpoints", "good", "goodput", "age"), rows), *reasons]


def drill_table(jobs: Sequence[Obj], now: float) -> list[str]:
    """Return how the newest restore drills ended."""
    rows = []
    for job in jobs[-_LAST_DRILLS:]:
        made = moment(job["metadata"]["creationTimestamp"])
        state = next((word for kind, word in (("Complete", "passed"), ("Failed", "failed")) if holds(job, kind)), "")
        state = state or ("queued" if (job.get("spec") or {}).get("suspend") else "running")
        rows.append(
            (job["metadata"]["labels"][RUN], job["metadata"]["namespace"], job["metadata"]["name"], state, clock(now - (made or now)))
        )
    return table(("drill of", "namespace", "job", "state", "age"), rows) if rows else []


def event_table(entries: Sequence[RunObjects], now: float) -> list[str]:
    """Return the newest events that matter."""
    events = sorted((event for entry in entries for event in notable(entry.events)), key=event_time)[-_LAST_EVENTS:]
    rows = [
        (clock(max(0.0, now - event_time(e))), e["involvedObject"].get("kind", ""), e.get("reason", ""), e.get("message", ""))
        for e in events
    ]
    return table(("ago", "object", "reason", "message"), rows) if rows else []


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned lines under a head."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]


def quantity(text: str, resource: str) -> str:
    """Return a quantity of the API server for people: bytes with a unit, all else as a plain number."""
    value = parse_quantity(text)
    return size(float(value)) if resource == "memory" or value >= _BYTES_FROM else f"{value.normalize():f}"


def _stored(store: Store, run: str, out: TextIO) -> list[str]:
    """Return the run's stored ledger, none with one line said where the store cannot be read: the cluster's side is worth showing alone."""
    try:
        return store.ledger_lines(run)
    except Problem as problem:
        print(problem.what, file=out)
        return []
