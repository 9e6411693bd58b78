"""What guards a run, with real processes under torchrun: the network test, the watchdog, and who is named."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
HANG_SECONDS = 3.0
CONFIG: dict[str, Any] = {
    "run": "guarded",
    "bucket": "none",
    "model": "byte-1m",
    "data": {"name": "none", "prefix": "datasets/none", "source": "/none"},
    "train": {
        "steps": 8,
        "batch_size": 1,
        "sequence_length": 8,
        "learning_rate": 0.1,
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "grad_clip": 1.0,
        "seed": 1,
        "log_every": 1,
    },
    "checkpoint": {"every_steps": 4},
    "grace_seconds": 60,
    "hang_seconds": HANG_SECONDS,
}
COMMON = """
import json, os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from training.config import Preflight, RunConfig
from training.errors import TrainerError
from training.preflight import preflight
from training.watchdog import Watchdog

FOLDER = Path(__file__).parent
torch.set_num_threads(1)
config = RunConfig.model_validate_json((FOLDER / "run.json").read_text())
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

def tell(**what):
    path = FOLDER / f"rank-{rank}.json"
    path.with_suffix(".partial").write_text(json.dumps({"pid": os.getpid(), **what}))
    path.with_suffix(".partial").replace(path)
"""
PREFLIGHT = """
tried = []
for scenario in SCENARIOS:
    config = config.model_copy(update={"preflight": Preflight(**scenario)})
    began, state = time.monotonic(), torch.get_rng_state()
    try:
        found = preflight(config, torch.device("cpu"))
        tried.append({"found": found, "seconds": time.monotonic() - began, "untouched": torch.equal(state, torch.get_rng_state())})
    except TrainerError as error:
        tried.append({"code": error.code, "message": error.message})
tell(tried=tried)
dist.barrier()
dist.destroy_process_group()
"""
LOOP = """
def on_hang(message):
    tell(message=message, hang=watchdog.hang, step=step)
    os._exit(0)

watchdog = Watchdog(config, rank, ranks, on_hang)
watchdog.start()
time.sleep(SLOW_START)
for step in range(1, 8):
    watchdog.beat("data", step)
    misbehave(rank, step)
    watchdog.beat("forward_backward", step)
    dist.all_reduce(torch.ones(1))
    time.sleep(STEP)
watchdog.stop()
tell(step=step, step_seconds=watchdog.step_seconds)
dist.barrier()
dist.destroy_process_group()
"""


class Gang:
    """Processes under torchrun that run a script of a test."""

    def __init__(self, folder: Path, script: str, processes: int, **changes: Any) -> None:
        self.folder, self.processes = folder, processes
        config = {**CONFIG, "processes": processes, **changes}
        (folder / "run.json").write_text(json.dumps(config))
        (folder / "script.py").write_text(COMMON + script)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node"]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [*command, str(processes), str(folder / "script.py")], cwd=REPOSITORY, env=environment, stdout=log, stderr=log
            )

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def told(self, rank: int) -> dict[str, Any]:
        path = self.folder / f"rank-{rank}.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    def end(self) -> list[dict[str, Any]]:
        """Wait for the end and give what each rank told."""
        assert self.process.wait(90) == 0, self.log
        return [self.told(rank) for rank in range(self.processes)]

    def abandon(self) -> None:
        if self.process.poll() is None:
            for rank in range(self.processes):
                with contextlib.suppress(ProcessLookupError, KeyError):
                    os.kill(self.told(rank)["pid"], signal.SIGKILL)
            self.process.kill()
            self.process.wait()


@pytest.fixture
def gang(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Gang]:
    def start(script: str, processes: int = 2, **changes: Any) -> Gang:
        started = Gang(tmp_path, script, processes, **changes)
        request.addfinalizer(started.abandon)
        return started

    return start


def loop(misbehave: str = "pass", slow_start: float = 0.0, step: float = 0.0) -> str:
    return f"SLOW_START, STEP = {slow_start}, {step}\ndef misbehave(rank, step):\n    {misbehave}\n" + LOOP


IMPOSSIBLE = {"floor_gigabytes_per_second": 1e6, "megabytes": 1}


def scenarios(*sections: dict[str, Any]) -> str:
    return f"SCENARIOS = {list(sections)}\n{PREFLIGHT}"


def test_the_preflight_measures_quickly_the_same_on_all_ranks_and_refuses_too_slow_a_network(gang: Callable[..., Gang]) -> None:
    first, second = (told["tried"] for told in gang(scenarios({}, {**IMPOSSIBLE, "enabled": False}, IMPOSSIBLE)).end())
    assert first[0]["found"] == second[0]["found"] > 0.005
    assert max(first[0]["seconds"], second[0]["seconds"]) < 2
    assert first[0]["untouched"], "drawing a random number would change the training"
    assert first[1]["found"] is None, "switched off"
    assert first[2] == second[2]
    assert first[2]["code"] == 46
    assert "the floor is 1e+06 GB/s. The slowest pair is rank 0 on" in first[2]["message"]


def test_the_slow_pair_is_the_one_with_the_slow_link(gang: Callable[..., Gang]) -> None:
    """Rank 2 of 4 answers rank 1 late, and nobody else."""
    slow = """
send = dist.send
def late(payload, peer):
    time.sleep(0.2 if (rank, peer) == (2, 1) else 0)
    send(payload, peer)
dist.send = late
"""
    told = gang(slow + scenarios(IMPOSSIBLE), 4).end()
    host = os.uname().nodename
    assert all(f"The slowest pair is rank 1 on {host} and rank 2 on {host}" in rank["tried"][0]["message"] for rank in told)


def test_a_single_rank_has_no_network_to_test(gang: Callable[..., Gang]) -> None:
    assert gang(scenarios(IMPOSSIBLE), 1).end()[0]["tried"][0]["found"] is None


def test_a_run_that_moves_on_is_left_alone_however_slowly_it_starts_and_when_its_steps_are_long(gang: Callable[..., Gang]) -> None:
    told = gang(loop("step == 7 and time.sleep(3)", slow_start=3.0, step=0.5), hang_seconds=1.0).end()
    assert [rank["step"] for rank in told] == [7, 7]
    assert all("message" not in rank for rank in told)
    assert told[0]["step_seconds"] == pytest.approx(0.5, abs=0.2)


def test_a_rank_that_sleeps_is_named_by_the_one_that_waits_for_it(gang: Callable[..., Gang]) -> None:
    began = time.monotonic()
    started = gang(loop("rank == 1 and step == 5 and time.sleep(60)"))
    told = started.end()
    assert time.monotonic() - began < 40
    assert told[0]["message"] == told[1]["message"], "all ranks say the same"
    assert "rank 1 on" in told[0]["message"]
    assert "is late, it was last seen in phase 'data' of step 5" in told[0]["message"]
    assert told[0]["hang"]["rank"] == 1
    assert HANG_SECONDS <= told[0]["hang"]["seconds"] < HANG_SECONDS + 2
    assert "misbehave" in started.log, "the stack shows where it sleeps"
    assert "all_reduce" in started.log, "the stack shows where the other one waits"


def test_a_stopped_process_is_named_soon(gang: Callable[..., Gang], until: Callable[..., object]) -> None:
    started = gang(loop("rank == 1 and step == 5 and (time.sleep(2), tell(stopped=True), os.kill(os.getpid(), signal.SIGSTOP))"))
    until("a stopped rank", lambda: "stopped" in started.told(1), seconds=60)
    began = time.monotonic()
    until("a message", lambda: "message" in started.told(0), seconds=60)
    assert time.monotonic() - began < HANG_SECONDS + 10
    hang = started.told(0)["hang"]
    assert (hang["rank"], hang["phase"], hang["step"]) == (1, "data", 5)
    assert "no longer answers" in hang["message"]


def test_a_process_that_was_stopped_raises_no_alarm_when_it_goes_on(gang: Callable[..., Gang], until: Callable[..., object]) -> None:
    started = gang(loop("rank == 0 and step == 5 and (tell(stopped=True), time.sleep(1))"), 1)
    until("a sleeping rank", lambda: "stopped" in started.told(0), seconds=60)
    pid = started.told(0)["pid"]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(HANG_SECONDS + 2)
    os.kill(pid, signal.SIGCONT)
    assert started.end()[0]["step"] == 7


def test_ranks_that_stand_at_the_same_place_are_not_accused(gang: Callable[..., Gang]) -> None:
    told = gang(loop("step == 5 and time.sleep(60)")).end()
    assert "no rank is behind the others" in told[0]["message"]
    assert told[0]["hang"]["rank"] is None


def test_a_dead_store_does_not_keep_the_alarm_from_ending_the_run(gang: Callable[..., Gang]) -> None:
    told = gang("os.environ['MASTER_PORT'] = '9'\n" + loop("step == 5 and time.sleep(60)")).end()
    assert "the job's store does not answer" in told[0]["message"]
    assert told[0]["hang"]["step"] == 5


def test_a_process_that_ends_while_its_watchdog_talks_to_the_store_ends_in_good_order(tmp_path: Path) -> None:
    script = """
import os, sys, time
from types import SimpleNamespace
import torch.distributed as dist
from training import watchdog

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
watchdog.PUBLISH_SECONDS = 0.0
watchdog.Watchdog(SimpleNamespace(hang_seconds=9.0), 0, 1, sys.exit).start()
time.sleep(0.3)
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=90)
    assert (ended.returncode, ended.stderr) == (0, "")
