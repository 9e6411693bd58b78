"""What checkpoints cost: `python benchmarks/checkpoints.py [--write]`.

1. For how long the training stands still for a save, asynchronous and synchronous, with the real trainer.
2. How fast one process writes the state to the object store, beside other ways to bring the same bytes there.
3. How long it takes to restore, by the number of processes.

A real S3 server runs on the same machine. What is compared is interleaved, round after round. Prints tables of medians; with `--write`
they go to `benchmarks/checkpoints.md` as well.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

import boto3  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from botocore.config import Config  # noqa: E402
from s3torchconnector import S3ClientConfig  # noqa: E402
from s3torchconnector.dcp import S3StorageWriter  # noqa: E402
from torch.distributed.checkpoint import state_dict_saver as dcp  # noqa: E402

from benchmarks.throughput import laboratory, note, written_by  # noqa: E402
from tests.trainer.lab import BUCKET, Lab  # noqa: E402
from training.catalog import CheckpointManifest  # noqa: E402
from training.checkpoint import Writer, save_now, state_of  # noqa: E402
from training.config import RunConfig  # noqa: E402
from training.models import MODELS  # noqa: E402
from training.optimizer import build_optimizer  # noqa: E402
from training.parallelize import build  # noqa: E402
from training.store import region  # noqa: E402

RESULT = PROJECT / "benchmarks" / "checkpoints.md"
GOAL_RATIO, GOAL_SHARE, INTERVAL_SECONDS = 25, 0.02, 300
WORLD_SIZES = (1, 2, 4)
GLOBAL_BATCH = 4  # whatever the number of processes
PARTS = ("stall", "write", "restore")


def run_config(lab: Lab, run: str, arguments: argparse.Namespace, processes: int, steps: int, **checkpoint: Any) -> dict[str, Any]:
    """Describe a run with short steps."""
    batch = {"batch_size": GLOBAL_BATCH // processes, "sequence_length": arguments.sequence}
    return lab.config(
        run,
        model=arguments.model,
        processes=processes,
        train={"steps": steps, **batch, "learning_rate": 0.0003, "warmup_steps": 0},
        data={"validation_windows": 2},
        checkpoint={"every_steps": None, "every_seconds": arguments.every_seconds, **checkpoint},
    )


class Stall(NamedTuple):
    """The saves of one run: for how long each stopped the training and how long it took, as told, and what the account of time has."""

    stalls: list[float]
    seconds: list[float]
    accounted: float  # per save, all the time that was not spent on steps because of it
    bytes: int


def stall(lab: Lab, run: str, arguments: argparse.Namespace, asynchronous: bool) -> Stall:
    """Train until so many saves are durable."""
    attempt = lab.start(run_config(lab, run, arguments, 2, 1_000_000, asynchronous=asynchronous, prove=True, keep=1))
    saves: dict[int, dict[str, Any]] = {}

    def enough(event: dict[str, Any]) -> bool:
        if event["event"] == "checkpoint" and len(saves) < arguments.saves:
            saves[event["step"]] = event
        return event["event"] == "error" or (
            len(saves) == arguments.saves and event["event"] == "goodput" and event["time"] > max(save["time"] for save in saves.values())
        )

    attempt.wait_for(enough)
    told = attempt.signal(signal.SIGTERM).end()
    assert len(saves) == arguments.saves, told.errors
    degraded = [event for event in told.named("degraded") if event["what"].startswith("checkpoints")]
    assert not degraded, degraded
    after = max(save["time"] for save in saves.values())
    account = next(event for event in told.named("goodput") if event["time"] > after)
    begun = sum(event["time"] < account["time"] for event in told.named("evaluate"))
    each = list(saves.values())
    return Stall(
        [save["stall_seconds"] for save in each],
        [save["seconds"] for save in each],
        account["seconds"]["save_stall"] / begun,
        each[0]["bytes"],
    )


def stalls(lab: Lab, arguments: argparse.Namespace) -> list[str]:
    """Compare asynchronous with synchronous saves."""
    rounds: list[tuple[Stall, Stall]] = []
    for number in range(arguments.rounds):
        both = stall(lab, f"asynchronous-{number}", arguments, True), stall(lab, f"synchronous-{number}", arguments, False)
        rounds.append(both)
        note(f"stall, round {number + 1}: {both}")
        _empty(lab, "runs/")
    rows = []
    for name, each in zip(("asynchronous", "synchronous"), zip(*rounds, strict=True), strict=True):
        times = [value for one in each for value in one.stalls]
        middle = statistics.median(times)
        goal = f" (goal {GOAL_SHARE:.0%})" if name == "asynchronous" else ""
        rows.append(
            f"| {name} | {middle:.3f} | {min(times):.3f} to {max(times):.3f} | {statistics.median(one.accounted for one in each):.3f} "
            f"| {statistics.median(value for one in each for value in one.seconds):.2f} | {middle / INTERVAL_SECONDS:.2%}{goal} |"
        )
    ratios = [statistics.median(slow.stalls) / statistics.median(quick.stalls) for quick, slow in rounds]
    return [
        "## The training stands still",
        "",
        f"{arguments.model}, {rounds[0][0].bytes / 1e6:,.0f} MB, 2 processes, sequence {arguments.sequence}; a checkpoint every "
        f"{arguments.every_seconds:g} s, {arguments.saves} per run, each proved beside the training; {len(rounds)} rounds. "
        "`Accounted` is what the account of time (class `save_stall`) has per save: the stall, collecting the result, storing the ledger.",
        "",
        f"| saves | stall, s | lowest to highest | accounted, s | save to durable, s | stall in {INTERVAL_SECONDS} s |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        f"Synchronous / asynchronous stall by round: {', '.join(f'{ratio:.1f}' for ratio in ratios)}; "
        f"median **{statistics.median(ratios):.1f}** (goal {GOAL_RATIO}).",
        "",
    ]


class Ways:
    """The ways to bring the same state to the server; each writes it once, below a prefix of its own."""

    def __init__(self, lab: Lab, arguments: argparse.Namespace) -> None:
        self._config = RunConfig.model_validate(run_config(lab, "written", arguments, 1, 1))
        module = build(self._config, torch.device("cpu")).module
        optimizer = build_optimizer(module, self._config.train)
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        self._state = state_of(module, optimizer)
        self._content = _serialized(self._state)
        self.bytes = len(self._content)
        unhashed = Config(s3={"payload_signing_enabled": False, "addressing_style": "path"}, request_checksum_calculation="when_required")
        self._client = boto3.client("s3", region_name=region(), config=unhashed)
        self._step = 0

    def ours(self) -> None:
        """Hash, write and commit."""
        self._step += 1
        train = self._config.train
        told = {"run": self._config.run, "attempt": 1, "step": self._step, "reason": "steps", "loss": 1.0, "validation_loss": None}
        where = {"world_size": 1, "mesh": {}, "cursor": {}, "scheduler": {"learning_rate": train.learning_rate}, "geometry": {}}
        manifest = CheckpointManifest(**told, **where, config={}, identity={}, goodput={}, time=time.time())
        uri = f"s3://{BUCKET}/runs/{self._config.run}/checkpoints/step-{self._step:08d}/000001"
        save_now(self._state, Writer(uri, self._config, manifest)).result()

    def connector(self) -> None:
        """Write with the connector's own writer."""
        client_config = S3ClientConfig(force_path_style=True)
        dcp.save(self._state, storage_writer=S3StorageWriter(region(), f"s3://{BUCKET}/peers/connector", s3client_config=client_config))

    def multipart(self) -> None:
        """Send the serialized state in parts, several at a time."""
        self._client.upload_fileobj(io.BytesIO(self._content), BUCKET, "peers/multipart")

    def raw(self) -> None:
        """Send the serialized state in one request."""
        self._client.put_object(Bucket=BUCKET, Key="peers/raw", Body=self._content)


def _serialized(state: dict[str, Any]) -> bytes:
    """Give the state as bytes."""
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def writes(lab: Lab, arguments: argparse.Namespace) -> list[str]:
    """Compare how fast the state is written."""
    os.environ.update(lab.gateway.environment)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{lab.folder}/alone", rank=0, world_size=1)
    ways = Ways(lab, arguments)
    named: dict[str, Callable[[], None]] = {
        "trainyard: DCP, SHA-256 of each object, manifest, commit": ways.ours,
        "s3torchconnector's S3StorageWriter, dcp.save": ways.connector,
        "boto3 upload_fileobj, multipart, from memory": ways.multipart,
        "the server itself: one boto3 put_object, from memory": ways.raw,
    }
    rates: dict[str, list[float]] = {name: [] for name in named}
    for number in range(arguments.rounds + 1):
        for name, way in named.items():
            os.sync()  # what the one before has left to be written must not count
            began = time.perf_counter()
            way()
            rates[name].append(ways.bytes / 1e6 / (time.perf_counter() - began))
            _empty(lab, "runs/written/", "peers/")
        note(f"write, round {number}: {[round(each[-1]) for each in rates.values()]} MB/s")
    dist.destroy_process_group()
    rates = {name: each[1:] for name, each in rates.items()}  # without the one in which everything was imported and connected
    ours, *peers = rates.values()
    ratios = [mine / max(theirs) for mine, *theirs in zip(ours, *peers[:2], strict=True)]
    rows = [f"| {name} | {statistics.median(each):,.0f} | {min(each):,.0f} to {max(each):,.0f} |" for name, each in rates.items()]
    return [
        "## Writing",
        "",
        f"{ways.bytes / 1e6:,.0f} MB, one process with one thread, which shares the cores with the server; the disk is idle when each way "
        f"begins; {arguments.rounds} rounds after one that does not count. Trainyard hashes all bytes (SHA-256) and lists, describes and "
        "commits what it wrote; the others do not hash (boto3 with unsigned payloads and without checksums, as it may over TLS).",
        "",
        "| way | MB/s | lowest to highest |",
        "|---|---|---|",
        *rows,
        "",
        f"Trainyard / the better of the connector and multipart by round: {', '.join(f'{ratio:.2f}' for ratio in ratios)}; "
        f"median **{statistics.median(ratios):.2f}**.",
        "",
    ]


def restores(lab: Lab, arguments: argparse.Namespace) -> list[str]:
    """Save with two processes, and resume with others."""
    told = lab.run(run_config(lab, "restored", arguments, 2, 2, prove=False))
    assert told.code == 0, told.errors
    size = told.named("checkpoint")[-1]["bytes"]
    seconds: dict[int, list[float]] = {processes: [] for processes in WORLD_SIZES}
    for number in range(arguments.rounds):
        for processes in WORLD_SIZES:
            told = lab.run(run_config(lab, "restored", arguments, processes, 2, prove=False))
            assert told.code == 0, told.errors
            seconds[processes].append(told.one("restore")["seconds"])
        note(f"restore, round {number + 1}: {seconds}")
    return [
        "## Restoring",
        "",
        f"{arguments.model}, {size / 1e6:,.0f} MB, saved by 2 processes, the same sequences per step; every object is verified (SHA-256), "
        f"then loaded; one thread per process, {os.cpu_count()} cores shared with the server; {arguments.rounds} rounds.",
        "",
        "| processes | restore, s | lowest to highest |",
        "|---|---|---|",
        *(f"| {count} | {statistics.median(each):.2f} | {min(each):.2f} to {max(each):.2f} |" for count, each in seconds.items()),
        "",
    ]


def _empty(lab: Lab, *prefixes: str) -> None:
    """Delete what has been measured, so that the disk does not fill up."""
    for prefix in prefixes:
        for key in lab.keys(prefix):
            lab.client.delete_object(Bucket=BUCKET, Key=key)


def main() -> None:
    """Measure, print the tables, and write them if wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="byte-44m", choices=MODELS)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=3, help="per run, when stalls are measured")
    parser.add_argument("--every-seconds", type=float, default=15.0, help="between these saves")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="measure only these")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    load, measures = os.getloadavg()[0], dict(zip(PARTS, (stalls, writes, restores), strict=True))
    with laboratory() as lab:
        tables = [line for part in arguments.parts for line in measures[part](lab, arguments)]
    told = "\n".join(["# Checkpoints", "", f"{written_by('checkpoints.py')} Load average when it began: {load:.1f}.", "", *tables])
    print(told)
    if arguments.write:
        RESULT.write_text(told)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
