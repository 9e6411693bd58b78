"""The log of a run as its pods write it, newest pod last, followed while it runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TextIO

from kubernetes.client.exceptions import ApiException

from local.errors import Problem
from local.view.cluster import Cluster, RunObjects, has_begun
from local.view.follow import INTERRUPTED
from local.view.waiting import stage_of

_EVERY = 1.0


def logs(run: str | None, kubeconfig: str | Path, out: TextIO | None = None) -> int:
    """Print the logs of a run (the newest one when none is named) until it ends; return 0, 1 when there is none, 130 after Ctrl-C."""
    screen = out or sys.stdout
    cluster = Cluster(kubeconfig)
    printed: set[str] = set()
    try:
        while entries := _entries(cluster, run):
            run = entries[-1].name
            told = [_print(cluster, entry, printed, screen) for entry in entries]
            if any(stage_of(entry).ended for entry in entries if entry.role == "train") or all(stage_of(entry).ended for entry in entries):
                return 0
            if not any(told):
                print(f"waiting: {stage_of(entries[-1]).reason or stage_of(entries[-1]).name}", file=screen, flush=True)
                _until_a_pod_begins(cluster, run, printed)
        print(f"no run {f'named {run} ' if run else ''}is deployed; make up", file=screen)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 1


def _entries(cluster: Cluster, run: str | None) -> list[RunObjects]:
    entries = cluster.runs(run)
    newest = entries[-1].name if entries else None
    return [entry for entry in entries if entry.name == newest]


def _print(cluster: Cluster, entry: RunObjects, printed: set[str], out: TextIO) -> bool:
    """Print every log of the entry's pods that was not printed yet, to the end of the pod; say whether there was one."""
    fresh = [pod for pod in entry.pods if pod["metadata"]["uid"] not in printed and has_begun(pod)]
    for pod in fresh:
        printed.add(pod["metadata"]["uid"])
        print(f"--- {pod['metadata']['namespace']}/{pod['metadata']['name']} ({entry.role})", file=out, flush=True)
        try:
            for line in cluster.log(pod, follow=True):
                print(line, file=out, flush=True)
        except (ApiException, Problem, OSError) as lost:
            print(f"--- the log ends here: {lost}", file=out, flush=True)
    return bool(fresh)


def _until_a_pod_begins(cluster: Cluster, run: str, printed: set[str]) -> None:
    """Return when another pod has begun, the run has ended, or its reason to wait has changed."""
    before = None
    while True:
        entries = _entries(cluster, run)
        reason = [stage_of(entry) for entry in entries]
        begun = any(has_begun(pod) and pod["metadata"]["uid"] not in printed for entry in entries for pod in entry.pods)
        if begun or (before is not None and reason != before):
            return
        before = reason
        time.sleep(_EVERY)
