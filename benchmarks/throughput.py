"""What the trainer costs beside a plain PyTorch loop, in tokens per second: `python benchmarks/throughput.py [--write]`.

The whole trainer (2 processes, gloo, a real S3 server, metrics, preflight, watchdog, eviction flag, keeper with proofs, asynchronous
checkpoints, evaluations) and `plain_loop.py` train the same model with the same batches, one after the other, round after round. Prints a
table of medians; with `--write` it goes to `benchmarks/throughput.md` as well.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from tests.trainer import lab as lab_module  # noqa: E402
from tests.trainer.gateway import Gateway  # noqa: E402
from tests.trainer.lab import BUCKET, CONFIG, Lab, Told  # noqa: E402

RESULT = PROJECT / "benchmarks" / "throughput.md"
GOAL = 0.99
SKIPPED_STEPS, LOG_EVERY = 20, 10
SAVE_AT = 0.6  # of the run, by the pace of the first plain round: at least one save is in its middle
FILES, FILE_BYTES = 4, 1 << 20
PATIENCE_SECONDS = 1800.0  # for one run, or for one thing that it tells; a loaded machine is slow


@contextmanager
def laboratory() -> Iterator[Lab]:
    """Give an object store with a dataset of random words, and end everything that was started against it, also on Ctrl-C and SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    lab_module.RUN_SECONDS = PATIENCE_SECONDS
    folder = Path(tempfile.mkdtemp(prefix="trainyard-bench-"))
    gateway, lab = None, None
    try:
        gateway = Gateway(folder / "store")
        gateway.client.create_bucket(Bucket=BUCKET)
        CONFIG["data"]["source"] = str(_text(folder / "text"))
        lab = Lab(gateway, folder / "lab")
        told = lab.run(lab.config("preparation"), "training.prepare")
        assert told.code == 0, told.errors
        yield lab
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        if lab is not None:
            lab.close()
        if gateway is not None:
            gateway.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _text(folder: Path) -> Path:
    """Write files of random words."""
    folder.mkdir()
    draw = random.Random(1)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(500)]
    for number in range(FILES):
        (folder / f"{number}.txt").write_text(" ".join(draw.choices(words, k=FILE_BYTES // 5))[:FILE_BYTES])
    return folder


def machine() -> str:
    """Describe this machine."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores of {model[1] if model else platform.processor()}, {memory:.0f} GiB, Linux {platform.release()}"


def written_by(script: str) -> str:
    """Say when and where a table was made."""
    return f"Written by `benchmarks/{script}` on {time.strftime('%Y-%m-%d')}. Machine: {machine()}."


def note(text: str) -> None:
    """Tell of the progress."""
    print(text, file=sys.stderr, flush=True)


class Rates(NamedTuple):
    """Tokens per second of one round."""

    plain: float
    steps_alone: float
    everything: float


class Comparison:
    """The two ways to train, of equal shape."""

    def __init__(self, lab: Lab, arguments: argparse.Namespace) -> None:
        self._lab, self._arguments = lab, arguments
        self.every_seconds: float | None = arguments.every_seconds
        self._step_tokens = arguments.batch * arguments.sequence * arguments.processes
        self._tokens = lab.folder / "tokens"
        self._tokens.write_bytes(b"".join(path.read_bytes() for path in sorted(Path(CONFIG["data"]["source"]).iterdir())))

    def rates(self, number: int) -> Rates:
        """Run both once."""
        intervals = _intervals(self._plain(number))
        plain = self._rate(intervals)
        if self.every_seconds is None:
            self.every_seconds = round(SAVE_AT * self._arguments.steps * self._step_tokens / plain, 1)
        told = self._trainer(number, self.every_seconds)
        intervals = _intervals(told.events)
        undisturbed = [interval for interval in intervals if not _saved_in(interval, told)]
        assert undisturbed, "a save fell into every interval: give a longer --every-seconds"
        assert len(undisturbed) < len(intervals), "no save fell into the middle of the run: give a shorter --every-seconds, or more --steps"
        return Rates(plain, self._rate(undisturbed), self._rate(intervals))

    def _rate(self, intervals: list[tuple[dict[str, Any], dict[str, Any]]]) -> float:
        steps = sum(end["step"] - begin["step"] for begin, end in intervals)
        seconds = sum(end["time"] - begin["time"] for begin, end in intervals)
        return steps * self._step_tokens / seconds

    def _plain(self, number: int) -> list[dict[str, Any]]:
        """Run the plain loop and give its events."""
        arguments, events, log = self._arguments, self._lab.folder / f"plain-{number}.jsonl", self._lab.folder / f"plain-{number}.log"
        shape = [arguments.model, arguments.steps, arguments.batch, arguments.sequence, LOG_EVERY]
        words = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", arguments.processes, PROJECT / "benchmarks/plain_loop.py"]
        command = [sys.executable, "-m", "torch.distributed.run", *words, *shape, self._tokens, events]
        own = {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(self._lab.folder / "tmp")}
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(word) for word in command], env={**os.environ, **own}, stdout=output, stderr=output, start_new_session=True
            )
        try:
            code = process.wait(PATIENCE_SECONDS)
        finally:
            process.kill()
            process.wait()
        assert code == 0, log.read_text()
        return [json.loads(line) for line in events.read_text().splitlines()]

    def _trainer(self, number: int, every_seconds: float) -> Told:
        """Run the trainer to its end."""
        arguments = self._arguments
        train = {"steps": arguments.steps, "batch_size": arguments.batch, "sequence_length": arguments.sequence, "log_every": LOG_EVERY}
        config = self._lab.config(
            f"round-{number}",
            model=arguments.model,
            processes=arguments.processes,
            train=train,
            checkpoint={"every_steps": None, "every_seconds": every_seconds, "prove": True},
        )
        told = self._lab.run({**config, "metrics": {"host": "127.0.0.1", "port": 0}})
        assert told.code == 0, told.errors
        missing = {"preflight", "metrics", "evaluate", "good"} - {event["event"] for event in told.events}
        assert not missing, f"the trainer did not have everything on: it never told of {missing}"
        return told


def _intervals(events: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pair the step events in the middle of a run, each with the next; and insist that something was learnt."""
    steps = [event for event in events if event["event"] == "step"]
    assert steps[-1]["loss"] < steps[0]["loss"], "the loss did not fall"
    return list(pairwise(step for step in steps if step["step"] >= SKIPPED_STEPS))


def _saved_in(interval: tuple[dict[str, Any], dict[str, Any]], told: Told) -> bool:
    """Tell whether an evaluation, the beginning of a save, or the collecting of its result fell between two step events."""
    begin, end = interval
    stopped = any(begin["step"] <= event["step"] < end["step"] for event in told.named("evaluate", "checkpoint"))
    return stopped or any(begin["time"] <= event["time"] < end["time"] for event in told.named("checkpoint"))


def table(rounds: list[Rates], every_seconds: float, arguments: argparse.Namespace, load: float) -> str:
    """Return the result as Markdown."""
    names = "plain loop", "trainer, its steps alone", "trainer, with its checkpoints and evaluations"
    ways = dict(zip(names, zip(*rounds, strict=True), strict=True))
    rows = []
    for name, rates in ways.items():
        ratios = [rate / each.plain for rate, each in zip(rates, rounds, strict=True)]
        goal = f" (goal {GOAL})" if "alone" in name else ""
        rows.append(
            f"| {name} | {statistics.median(rates):,.0f} | {min(rates):,.0f} to {max(rates):,.0f} "
            f"| {', '.join(f'{ratio:.3f}' for ratio in ratios)} | **{statistics.median(ratios):.3f}**{goal} |"
        )
    return "\n".join(
        [
            "# What the trainer costs",
            "",
            written_by("throughput.py"),
            f"{arguments.model}, {arguments.processes} processes with one thread each, gloo, sequence {arguments.sequence}, batch "
            f"{arguments.batch} per process, float32, {arguments.steps} steps.",
            "The plain loop: DDP, fused AdamW, gradient clipping, tokens in memory, nothing else. The trainer: a real S3 server on this "
            "machine, data through its cache, metrics endpoint, preflight, watchdog, agreement on evictions at every step, deterministic "
            "algorithms, a keeper that proves each checkpoint.",
            f"An evaluation and an asynchronous checkpoint every {every_seconds:g} s; the steps alone leave out the intervals of "
            f"{LOG_EVERY} steps in which one began or was collected, not the proofs beside them.",
            f"Wall time between step events, from step {SKIPPED_STEPS} on; medians of {len(rounds)} interleaved rounds. "
            f"Load average when it began: {load:.1f}.",
            "",
            "| | tokens/s | lowest to highest | trainer / plain by round | median |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    """Measure, print the table, and write it if wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--model", default="byte-3m")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="sequences per process")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--every-seconds", type=float, help="between checkpoints (default: so that one is in the middle of the run)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    load, rounds = os.getloadavg()[0], []
    with laboratory() as lab:
        comparison = Comparison(lab, arguments)
        for number in range(arguments.rounds):
            rounds.append(comparison.rates(number))
            note(f"round {number + 1}: {rounds[-1]}")
        assert comparison.every_seconds is not None
        told = table(rounds, comparison.every_seconds, arguments, load)
    print(told)
    if arguments.write:
        RESULT.write_text(told)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
