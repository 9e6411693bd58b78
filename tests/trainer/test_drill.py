"""Restore drills: real runs restored on other numbers of processes, and runs that only claim to be restorable."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from training.catalog import CheckpointManifest
from training.config import RunConfig
from training.drill import objections, reshaped
from training.errors import ConfigurationError

from .lab import CONFIG, REPOSITORY, Lab, Told

STEPS, LAST_SAVED = 16, 12


def config(processes: int, batch: int = 4, accumulation: int = 1, **mesh: int) -> RunConfig:
    train = CONFIG["train"] | {"batch_size": batch, "accumulation": accumulation}
    return RunConfig.model_validate(
        CONFIG | {"processes": processes, "train": train, "mesh": mesh, "data": CONFIG["data"] | {"source": "/"}}
    )


SHAPES = {
    "fewer copies": (config(4), 2, {"shard": 1, "tensor": 1, "pipeline": 1}, (4, 2)),
    "more copies than the batch has parts": (config(1, batch=6), 4, None, None),
    "more copies, smaller batches": (config(2, batch=4), 8, {"shard": 1, "tensor": 1, "pipeline": 1}, (1, 1)),
    "the same": (config(4, shard=2, tensor=2), 4, {"shard": 2, "tensor": 2, "pipeline": 1}, (4, 1)),
    "fewer shards": (config(4, shard=4), 2, {"shard": 2, "tensor": 1, "pipeline": 1}, (4, 2)),
    "no tensor parallelism on one": (config(4, shard=2, tensor=2), 1, {"shard": 1, "tensor": 1, "pipeline": 1}, (4, 2)),
    "tensor parallelism that divides": (config(4, tensor=2, shard=2), 2, {"shard": 1, "tensor": 2, "pipeline": 1}, (4, 2)),
}


@pytest.mark.parametrize("case", SHAPES)
def test_a_run_described_on_another_number_of_processes(case: str) -> None:
    was, world_size, mesh, batches = SHAPES[case]
    if mesh is None:
        with pytest.raises(ConfigurationError, match="--world-size"):
            reshaped(was, was, world_size)
        return
    found = reshaped(was, was, world_size)
    assert found.processes == world_size
    assert found.mesh.model_dump(include=set(mesh)) == mesh
    assert (found.train.batch_size, found.train.accumulation) == batches
    assert found.global_batch == was.global_batch


def manifest_of(world_size: int, validation_loss: float | None) -> CheckpointManifest:
    return CheckpointManifest.model_construct(world_size=world_size, validation_loss=validation_loss)


VERDICTS = {
    "all as it was": (2, 3.0, {11: 3.5}, 3.0, {11: 3.5, 12: 3.4}, 0),
    "another sum on another world size": (1, 3.0, {11: 3.5}, 3.0, {11: 3.5009}, 0),
    "too much even so": (1, 3.0, {11: 3.5}, 3.0, {11: 3.502}, 1),
    "bit for bit on the same one": (2, 3.0, {11: 3.5}, 3.0, {11: 3.500001}, 1),
    "another validation loss": (2, 3.0, {11: 3.5}, 3.01, {11: 3.5}, 1),
    "a loss that is no number": (1, 3.0, {11: 3.5}, math.nan, {11: math.nan}, 2),
    "only the validation loss was told": (2, 3.0, {}, 3.0, {11: 3.5}, 0),
    "nothing was told": (2, None, {4: 3.5}, 3.0, {11: 3.5}, 1),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_what_counts_as_the_same(case: str) -> None:
    saved_by, recorded, told, validation, losses, problems = VERDICTS[case]
    found = {"validation_loss": validation, "losses": losses}
    assert len(objections(manifest_of(saved_by, recorded), config(2), told, found)) == problems


def drill(lab: Lab, run: str, *words: str) -> subprocess.CompletedProcess[str]:
    path = lab.folder / f"drill-{run}.json"
    path.write_text(json.dumps(lab.config(run)))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment = {**inherited, **lab.gateway.environment, "TMPDIR": str(lab.folder / "tmp")}
    command = [sys.executable, "-m", "training", "drill", "--config", str(path), *words]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def copy_of(lab: Lab, run: str) -> None:
    """Give the checkpoints of the run another name."""
    for key in lab.keys("runs/drilled/checkpoints/"):
        lab.put(key.replace("drilled", run), lab.get(key))


def report(lab: Lab, run: str) -> dict[str, Any]:
    """Read the newest report."""
    return json.loads(lab.get(lab.keys(f"runs/{run}/drills/")[-1]))


@pytest.fixture(scope="module")
def drilled(lab: Lab) -> Told:
    """A run of two processes that went on after the newest checkpoint that there is now."""
    told = lab.run(lab.config("drilled", train={"steps": STEPS}, checkpoint={"every_steps": LAST_SAVED, "prove": True}))
    assert told.code == 0, told.errors
    lab.client.delete_object(Bucket="lab", Key=f"runs/drilled/checkpoints/step-{STEPS:08d}/COMMITTED")
    return told


def test_the_keeper_proved_the_run_while_it_trained(drilled: Told) -> None:
    last = drilled.named("good")[-1]
    assert last["step"] == STEPS
    assert last["reproduced"] == pytest.approx(last["loss"], rel=1e-4)
    assert drilled.named("retained")[-1]["kept"][str(STEPS)] == ["newest", "best", "good"]
    assert not drilled.named("warning", "skipped")


@pytest.mark.parametrize(("world_size", "tolerance"), [(2, 0.0), (1, 1e-3)])
def test_a_run_is_restored_and_goes_on_as_it_did(lab: Lab, drilled: Told, world_size: int, tolerance: float) -> None:
    before = {key: lab.get(key) for key in lab.keys("runs/drilled/") if "/drills/" not in key}
    done = drill(lab, "drilled", "--world-size", str(world_size), "--steps", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    found = report(lab, "drilled")
    assert (found["step"], found["saved_world_size"], found["world_size"]) == (LAST_SAVED, 2, world_size)
    assert found["losses"].keys() == {str(step) for step in range(LAST_SAVED + 1, LAST_SAVED + 4)}
    assert found["losses"] == {step: pytest.approx(drilled.losses[int(step)], abs=tolerance, rel=0) for step in found["losses"]}
    evaluated = next(event for event in drilled.named("evaluate") if event["step"] == LAST_SAVED)
    assert found["validation_loss"] == pytest.approx(evaluated["loss"], rel=1e-4)
    assert done.stdout.startswith(f"restore drill of drilled at step {LAST_SAVED}: passed")
    assert "Traceback" not in done.stderr
    assert {key: lab.get(key) for key in lab.keys("runs/drilled/") if "/drills/" not in key} == before, "nothing of the run is touched"


def test_a_sharded_run_in_lower_precision_is_proved_and_restored_on_one_process(lab: Lab) -> None:
    content = lab.config("sharded", train={"steps": 8, "precision": "bfloat16"}, checkpoint={"every_steps": 4, "prove": True}) | {
        "mesh": {"shard": 2}
    }
    told = lab.run(content)
    assert told.code == 0, told.errors
    assert told.named("good")[-1]["step"] == 8
    lab.client.delete_object(Bucket="lab", Key="runs/sharded/checkpoints/step-00000008/COMMITTED")
    done = drill(lab, "sharded")
    assert done.returncode == 0, done.stdout + done.stderr
    assert report(lab, "sharded")["losses"].keys() == {"5", "6", "7", "8"}


def test_another_curve_fails_the_drill(lab: Lab, drilled: Told) -> None:
    copy_of(lab, "bent")
    events = [event | {"loss": event["loss"] + 0.01} if event["event"] == "step" else event for event in lab.ledger("drilled")]
    lab.put("runs/bent/ledger.jsonl", "".join(json.dumps(event) + "\n" for event in events).encode())
    done = drill(lab, "bent", "--steps", "1")
    assert done.returncode == 1
    assert f"the loss of step {LAST_SAVED + 1} was" in done.stdout
    assert report(lab, "bent")["verdict"] == "failed"


def test_a_damaged_checkpoint_fails_the_drill(lab: Lab, drilled: Told) -> None:
    copy_of(lab, "rotten")
    key = next(key for key in lab.keys("runs/rotten/checkpoints/") if key.endswith(".distcp"))
    lab.flip_bit(key)
    done = drill(lab, "rotten")
    assert done.returncode == 1
    assert key in done.stdout
    assert key in report(lab, "rotten")["problems"][0]


def test_a_run_without_checkpoints_has_no_drill(lab: Lab) -> None:
    done = drill(lab, "blank")
    assert (done.returncode, done.stdout) == (47, "")
    assert "runs/blank/checkpoints" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_commands_are_listed(tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "training", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)

    helped, mistaken = run("--help"), run("trian")
    assert (helped.returncode, mistaken.returncode) == (0, 44)
    assert [line.split()[0] for line in helped.stdout.splitlines()[1:]] == ["launch", "prepare", "warm", "keeper", "drill", "export"]
    assert helped.stdout in mistaken.stderr
