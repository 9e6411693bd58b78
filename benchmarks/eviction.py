"""How long from an eviction to a durable checkpoint, and what is lost: `python benchmarks/eviction.py [--write]`.

One run is evicted (SIGTERM to its first process) at random moments, and started again each time; each attempt resumes what the last one
left. Prints a table; with `--write` it goes to `benchmarks/eviction.md` as well.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from benchmarks.throughput import laboratory, note, written_by  # noqa: E402
from tests.trainer.lab import Attempt, Lab, Told  # noqa: E402

RESULT = PROJECT / "benchmarks" / "eviction.md"
GOAL_SECONDS, GOAL_STEPS = 10.0, 1
RESUMED = {"fresh", "restore"}


@dataclass
class Eviction:
    """One of them. `reached` is the last step that was told or counted, `resumed` the one that the next attempt went on from."""

    code: int
    decision: str
    seconds: float | None  # from the signal to the durable checkpoint, as the trainer tells
    exit_seconds: float  # from the signal to the end of the first process, as seen from outside
    saving: bool  # while another checkpoint was being written
    reached: int
    resumed: int = -1

    @property
    def lost(self) -> int:
        """Count the steps that have to be done again."""
        return self.reached - self.resumed


def run_config(lab: Lab, arguments: argparse.Namespace) -> dict[str, Any]:
    """Describe a run that is longer than the evictions, with short steps."""
    train = {"steps": 1_000_000, "batch_size": 1, "sequence_length": arguments.sequence, "log_every": 1, "learning_rate": 0.0003}
    return lab.config(
        "evicted",
        model=arguments.model,
        grace_seconds=arguments.grace_seconds,
        train=train,
        data={"validation_windows": 2},
        checkpoint={"every_steps": None, "every_seconds": arguments.every_seconds, "prove": True},
    )


def evict(attempt: Attempt, delay: float) -> tuple[Told, Eviction]:
    """Wait, send the signal, and see what comes of it."""
    time.sleep(delay)
    sent = time.time()
    told = attempt.signal(signal.SIGTERM).end()
    exit_seconds = time.time() - sent
    evicted = told.named("evicted")
    before = [event for event in told.events if event["time"] < sent]
    begun = [event["step"] for event in before if event["event"] == "evaluate"]
    collected = [event["step"] for event in before if event["event"] == "checkpoint"]
    reached = max((event.get("step", 0) for event in told.named("step", "restore", "evicted")), default=0)
    if not evicted:
        note(f"the attempt ended with {told.code} without telling of its eviction:\n{told.errors[-2000:]}")
        return told, Eviction(told.code, "not told", None, exit_seconds, len(begun) > len(collected), reached)
    event = evicted[0]
    return told, Eviction(
        told.code, event["decision"], event["seconds"] if event["saved"] else None, exit_seconds, len(begun) > len(collected), reached
    )


def measure(lab: Lab, arguments: argparse.Namespace) -> list[Eviction]:
    """Evict again and again. A last attempt only shows what the one before it has left."""
    config, draw, end = run_config(lab, arguments), random.Random(arguments.seed), time.monotonic() + 60 * arguments.minutes
    evictions: list[Eviction] = []
    while True:
        attempt = lab.start(config)
        attempt.wait_for(lambda event: event["event"] in RESUMED or event["event"] == "error")
        last = len(evictions) == arguments.evictions or time.monotonic() >= end
        told, eviction = evict(attempt, 0 if last else draw.uniform(0, arguments.window))
        resumed = told.named("restore")
        assert resumed or told.named("fresh"), f"the run cannot be resumed: {told.errors}\n{told.named('error')}"
        if evictions:
            evictions[-1].resumed = resumed[0]["step"] if resumed else 0
            note(f"{len(evictions)}: {evictions[-1]}, lost {evictions[-1].lost}")
        if last:
            return evictions
        evictions.append(eviction)


def percentile(values: Sequence[float], share: float) -> float:
    """Give the value that this share of all values does not exceed (nearest rank)."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


def row(name: str, values: Sequence[float], goals: tuple[str, str] = ("", ""), digits: int = 2) -> str:
    """Return a row of the table: p50, p95 and maximum."""
    if not values:
        return f"| {name} | 0 | | | |"
    middle, high = statistics.median(values), percentile(values, 0.95)
    return f"| {name} | {len(values)} | {middle:.{digits}f} | {high:.{digits}f}{goals[0]} | {max(values):.{digits}f}{goals[1]} |"


def table(evictions: list[Eviction], arguments: argparse.Namespace, load: float) -> str:
    """Return the result as Markdown."""
    durable = {
        saving: [each.seconds for each in evictions if each.seconds is not None and each.saving is saving] for saving in (False, True)
    }
    codes = Counter((each.code, each.decision) for each in evictions)
    return "\n".join(
        [
            "# Evictions",
            "",
            written_by("eviction.py"),
            f"{arguments.model} on 2 processes with one thread each, gloo, sequence {arguments.sequence}, batch 1 per process; grace "
            f"period {arguments.grace_seconds} s; an asynchronous checkpoint every {arguments.every_seconds:g} s, each proved beside it. "
            "The S3 server runs on the same machine.",
            f"SIGTERM to the first process of one run, up to {arguments.window:g} s after it had resumed (uniform, seed {arguments.seed}); "
            f"{len(evictions)} evictions. Load average when it began: {load:.1f}.",
            "",
            "| | evictions | p50 | p95 | max |",
            "|---|---|---|---|---|",
            row("**signal to durable, s**", [*durable[False], *durable[True]], (f" (goal {GOAL_SECONDS:g})", "")),
            row("while nothing was being saved, s", durable[False]),
            row("while a checkpoint was being written, s", durable[True]),
            row("signal to the end of the process, s", [each.exit_seconds for each in evictions]),
            row("**steps lost**", [each.lost for each in evictions], ("", f" (goal {GOAL_STEPS})"), 0),
            "",
            "| exit code | decision | evictions |",
            "|---|---|---|",
            *(f"| {code} | {decision} | {count} |" for (code, decision), count in sorted(codes.items())),
            "",
        ]
    )


def main() -> None:
    """Measure, print the table, and write it if wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evictions", type=int, default=30)
    parser.add_argument("--model", default="byte-44m")
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--every-seconds", type=float, default=10.0, help="between checkpoints")
    parser.add_argument("--window", type=float, default=25.0, help="seconds after resuming within which the signal comes")
    parser.add_argument("--grace-seconds", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no more evictions after this time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with laboratory() as lab:
        evictions = measure(lab, arguments)
    told = table(evictions, arguments, load)
    print(told)
    if arguments.write:
        RESULT.write_text(told)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
