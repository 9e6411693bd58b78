"""The restore drill: whether a run can be restored on another number of processes than it was saved by, and goes on as it did.

Restores the last-known-good checkpoint on processes of this machine, replays the steps after it, and compares their losses and the
validation loss with those that the run told. Nothing of the run is changed; a report is added at runs/RUN/drills/TIME.json.
Ends with 0 when everything agrees, 1 when not, 47 when there is no checkpoint.
"""

import argparse
import io
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from training.catalog import Catalog, CheckpointManifest, DamagedCheckpointError
from training.config import RunConfig, load
from training.errors import DONE, UNEXPECTED, ConfigurationError, NoUsableCheckpointError, TrainerError
from training.events import Events
from training.keeper import TOLERANCE, reproduced
from training.launch import CONFIG_PATH, ENVIRONMENT, LOOPBACK
from training.ledger import Ledger
from training.store import place_of
from training.work import Order, Work, adopt_orphans, die_with_parent, kill_children

RESULT = "result.json"
LOSS_TOLERANCE = 1e-3  # absolute, of a step's loss when sums are added in another order; in lower precision its own tolerance


def reshaped(was: RunConfig, here: RunConfig, world_size: int) -> RunConfig:
    """Describe a run on so many processes of this machine: the same samples in a step, and as much of the mesh as fits."""
    content = was.model_dump(mode="json") | {"bucket": here.bucket, "processes": world_size, "nodes": 1}
    content |= {"preflight": {"enabled": False}, "metrics": {}}
    content["checkpoint"]["folder"] = here.checkpoint.folder
    content["data"] |= {"cache_folder": here.data.cache_folder, "cache_bytes": here.data.cache_bytes}
    if world_size != was.processes:
        tensor = math.gcd(was.mesh.tensor, world_size)
        pipeline = math.gcd(was.mesh.pipeline, world_size // tensor)
        degree = world_size // (tensor * pipeline)
        copies = was.mesh.shard == was.mesh.tensor == was.mesh.pipeline == 1
        content["mesh"] |= {"replicate": None, "shard": 1 if copies else degree, "tensor": tensor, "pipeline": pipeline}
        share, rest = divmod(was.global_batch, degree)
        if rest:
            raise ConfigurationError(f"--world-size: the {was.global_batch} samples of a step do not divide over {degree} data ranks")
        batch = math.gcd(share, was.train.batch_size)
        content["train"] |= {"batch_size": batch, "accumulation": share // batch}
    try:
        return RunConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigurationError(f"--world-size: {error.errors(include_url=False, include_input=False)[0]['msg']}") from None


def objections(manifest: CheckpointManifest, config: RunConfig, told: dict[int, float], found: dict[str, Any]) -> list[str]:
    """Say where the replay differs from what the run told."""
    precision, recorded = config.train.precision, manifest.validation_loss
    exact = config.processes == manifest.world_size and precision == "float32"
    tolerance = 0.0 if exact else max(LOSS_TOLERANCE, TOLERANCE[precision])
    pairs = {step: (told[step], loss) for step, loss in found["losses"].items() if step in told}
    problems = [f"the loss of step {step} was {was}, is {now}" for step, (was, now) in pairs.items() if not abs(now - was) <= tolerance]
    if recorded is not None and not reproduced(recorded, found["validation_loss"], precision):
        problems.append(f"the validation loss was {recorded}, is {found['validation_loss']}")
    if recorded is None and not pairs:
        problems.append("there is nothing to compare with: neither a validation loss of the checkpoint nor the loss of a replayed step")
    return problems


def drill(here: RunConfig, run: str, world_size: int, steps: int) -> dict[str, Any]:
    """Restore, replay, compare, and store the report."""
    place = place_of(here)
    catalog = Catalog(place, run)
    good = catalog.good()
    step = next(iter(good or catalog.committed()), None)
    if step is None:
        raise NoUsableCheckpointError(f"the run {run} has no checkpoint at {place.uri(catalog.prefix)}")
    report = {"run": run, "step": step, "good": bool(good), "time": round(time.time(), 3), "world_size": world_size}
    with tempfile.TemporaryDirectory(prefix="trainyard-drill-") as folder:
        work = Work(Path(folder))
        ledger = Ledger(work.ledger, place, run)
        ledger.fetch()
        told = {event["step"]: event["loss"] for event in ledger.events() if event["event"] == "step"}
        try:
            manifest = catalog.verified(step)
            config = reshaped(RunConfig.model_validate(manifest.config), here, world_size)
            found = _in_workers(config, manifest, steps, work)
            report |= {"saved_world_size": manifest.world_size, "problems": objections(manifest, config, told, found), **found}
            report["told"] = {"validation_loss": manifest.validation_loss, "losses": {at: told[at] for at in found["losses"] if at in told}}
        except DamagedCheckpointError as error:
            report["problems"] = [str(error)]
    report["verdict"] = "failed" if report["problems"] else "passed"
    key = f"runs/{run}/drills/{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json"
    place.put(key, json.dumps(report, indent=1).encode())
    return report | {"uri": place.uri(key)}


def _in_workers(config: RunConfig, manifest: CheckpointManifest, steps: int, work: Work) -> dict[str, Any]:
    """Have worker processes restore a checkpoint and go on, and give what rank 0 wrote down."""
    work.give(Order(config.model_dump(mode="json"), manifest.attempt, time.time(), {}, 0))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--max-restarts", "0"]
    command += ["--nproc-per-node", str(config.processes), "-m", "training.drill", str(work.path), str(manifest.step), str(steps)]
    environment = {**ENVIRONMENT, **LOOPBACK, **os.environ}
    code = subprocess.run(command, env=environment, stdout=sys.stderr, preexec_fn=die_with_parent, check=False).returncode
    kill_children()
    if not (work.path / RESULT).is_file():
        raise TrainerError(f"the workers ended with {code} and without a result; what they said is above")
    found = json.loads((work.path / RESULT).read_text())
    if "error" in found:
        raise TrainerError(found["error"], found["code"])
    return found | {"losses": {int(at): loss for at, loss in found["losses"].items()}}


def replay(work: Work, step: int, steps: int) -> dict[str, Any]:
    """Restore and go on, as one of the workers."""
    from training.checkpoint import load_state, reader
    from training.checkpointer import Progress
    from training.dataset import Cursor
    from training.ranks import leave
    from training.train import Training

    order = work.order()
    config = RunConfig.model_validate(order.config)
    training = Training(config, order, work, Events(config.run, order.attempt, io.StringIO()))
    catalog, began = Catalog(place_of(config), config.run), time.monotonic()
    manifest = catalog.manifest(step)
    load_state(reader(catalog, manifest), training.parts.module, training.optimizer)
    seconds, losses = round(time.monotonic() - began, 3), {}
    training.progress, training.told_at = Progress(step, manifest.loss, Cursor(**manifest.cursor)), math.inf
    training.loader.seek(training.progress.cursor)
    validation_loss = training.evaluate()
    while training.progress.step < min(step + steps, config.train.steps):
        training.step()
        losses[training.progress.step] = training.progress.loss
    training.close()
    leave()
    return {"restore_seconds": seconds, "validation_loss": validation_loss, "losses": losses}


def _worker(folder: str, step: str, steps: str) -> None:
    """Replay; rank 0 writes down what came out. Errors are the same on every rank."""
    die_with_parent()
    work = Work(Path(folder))
    try:
        found = replay(work, int(step), int(steps))
    except TrainerError as error:
        found = {"error": error.message, "code": error.code}
    if os.environ["RANK"] == "0":
        (work.path / RESULT).write_text(json.dumps(found))


def described(report: dict[str, Any]) -> str:
    """Say in a few lines what was done and what came out."""
    lines = [f"restore drill of {report['run']} at step {report['step']}: {report['verdict']}"]
    if not report["good"]:
        lines.append("no checkpoint of the run is good yet, so this was the newest one")
    if told := report.get("told"):
        lines.append(
            f"saved by {report['saved_world_size']} process(es), restored on {report['world_size']} in {report['restore_seconds']} s"
        )
        lines.append(f"validation loss {report['validation_loss']}, was {told['validation_loss']}")
        lines += [f"loss of step {step} {loss}, was {told['losses'].get(step)}" for step, loss in report["losses"].items()]
    return "\n  ".join([*lines, *report["problems"], report["uri"]])


def main() -> int:
    """Drill and report."""
    parser = argparse.ArgumentParser(prog="python -m training drill", description=__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG_PATH, help="the run's configuration (default: %(default)s)")
    parser.add_argument("--run", help="another run of the same bucket or folder")
    parser.add_argument("--world-size", type=int, help="processes to restore on (default: half as many as the run has)")
    parser.add_argument("--steps", type=int, default=5, help="steps to replay (default: %(default)s)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # process 1 of a container has no default action for it
    adopt_orphans()
    here = load(arguments.config)
    report = drill(here, arguments.run or here.run, arguments.world_size or max(here.processes // 2, 1), arguments.steps)
    print(described(report))
    return DONE if report["verdict"] == "passed" else UNEXPECTED


if __name__ == "__main__":
    _worker(*sys.argv[1:])
