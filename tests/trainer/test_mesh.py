"""Every way to arrange the ranks computes the same training: the loss of one process, within what the order of additions costs."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from training.config import RunConfig

from .lab import CONFIG, REPOSITORY
from .mesh_steps import ROWS

STEPS, TOLERANCE = 20, 1e-5
MESHES: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "gradient accumulation": (1, {}, {"accumulation": 4}),
    "activation checkpointing": (1, {}, {"recompute": "full"}),
    "selective activation checkpointing": (1, {}, {"recompute": "selective"}),
    "DDP": (2, {"replicate": 2}, {}),
    "ZeRO-3": (2, {"shard": 2}, {}),
    "ZeRO-2 with accumulation": (2, {"shard": 2, "zero": 2}, {"accumulation": 2}),
    "ZeRO-1 with accumulation": (2, {"shard": 2, "zero": 1}, {"accumulation": 2}),
    "tensor parallel": (2, {"tensor": 2}, {}),
    "pipeline": (2, {"pipeline": 2}, {"accumulation": 2}),
    "HSDP": (4, {"replicate": 2, "shard": 2}, {}),
    "ZeRO-3 with tensor parallel": (4, {"shard": 2, "tensor": 2}, {"recompute": "full"}),
    "ZeRO-1 with a pipeline": (4, {"shard": 2, "pipeline": 2, "zero": 1}, {"accumulation": 2}),
    "tensor parallel in a pipeline": (4, {"tensor": 2, "pipeline": 2}, {"accumulation": 4}),
}


def losses(processes: int, mesh: dict[str, int], train: dict[str, Any]) -> list[float]:
    """Train on a mesh; the global batch stays the same."""
    degree = processes // (mesh.get("tensor", 1) * mesh.get("pipeline", 1))
    rows = ROWS // degree // train.get("accumulation", 1)
    changed = {"steps": STEPS, "batch_size": rows, "learning_rate": 3e-4, "warmup_steps": 10, **train}
    content = {**CONFIG, "model": "byte-3m", "processes": processes, "mesh": mesh, "train": {**CONFIG["train"], **changed}}
    config = RunConfig.model_validate({**content, "data": {**CONFIG["data"], "source": "/"}})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(processes), "-m", "tests.trainer.mesh_steps", config.model_dump_json()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def reference() -> list[float]:
    return losses(1, {}, {})


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_gives_the_loss_of_a_single_process(name: str, reference: list[float]) -> None:
    processes, mesh, train = MESHES[name]
    found = losses(processes, mesh, train)
    assert reference[STEPS - 1] < reference[0] - 0.5, "something is learnt"
    assert found == pytest.approx(reference, abs=TOLERANCE)


def test_compiled_blocks_give_the_loss_of_plain_ones(reference: list[float]) -> None:
    assert losses(2, {"shard": 2}, {"compile": True, "recompute": "selective"}) == pytest.approx(reference, abs=1e-4)


def test_bfloat16_stays_near_float32(reference: list[float]) -> None:
    assert losses(2, {"shard": 2}, {"precision": "bfloat16"}) == pytest.approx(reference, abs=0.02)
