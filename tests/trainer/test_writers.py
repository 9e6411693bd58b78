"""Who may write a checkpoint and what is left when a writer dies: real writers, real kills, a real store behind a proxy that misbehaves."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from training.catalog import Catalog, CheckpointManifest
from training.errors import SupersededError
from training.store import Folder, Store

from .gateway import Gateway, port_for_later
from .lab import BUCKET, CONFIG, Attempt, Told
from .proxy import Proxy

SECONDS = 150
TINY_SHARED_MEMORY = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh"]


class Savers:
    """Runs saver.py on some ranks against a store, or against a proxy in front of it."""

    def __init__(self, gateway: Gateway, folder: Path) -> None:
        self.gateway, self.folder = gateway, folder
        self.run = f"run-{folder.name}".replace("_", "-").lower()[:40].rstrip("-")
        self.proxy = Proxy(gateway.url)
        self._attempts: list[Attempt] = []

    def catalog(self) -> Catalog:
        """Look at the run's checkpoints without the proxy."""
        return Catalog(Store(BUCKET), self.run)

    def start(self, save: list[int], *, ranks: int = 1, prefix: tuple[str, ...] = (), **changes: Any) -> "Ranks":
        """Start the ranks; `changes` are keys of the run file."""
        sections = {**CONFIG, "run": self.run, "processes": ranks, "data": {**CONFIG["data"], "source": "/none"}}
        for key, value in changes.items():
            sections[key] = {**sections.get(key, {}), **value} if isinstance(value, dict) else value
        plan = {"config": sections, "steps": max(save, default=0), "save": save}
        return Ranks(self, plan, ranks, prefix)

    def launch(self, command: list[str], **environment: str) -> Attempt:
        """Start one rank."""
        number = len(self._attempts)
        log = self.folder / f"rank-{number}.log"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        variables = {**inherited, **self.gateway.environment, "AWS_ENDPOINT_URL": self.proxy.url, "LAB_ATTEMPT": str(log), **environment}
        self._attempts.append(Attempt(command, variables, log))
        return self._attempts[-1]

    def close(self) -> None:
        """End whatever still runs."""
        self.proxy.close()
        for attempt in self._attempts:
            attempt.abandon()


class Ranks:
    """The processes of one attempt."""

    def __init__(self, savers: Savers, plan: dict[str, Any], ranks: int, prefix: tuple[str, ...]) -> None:
        port = port_for_later()
        path = savers.folder / f"plan-{port}.json"
        path.write_text(json.dumps(plan))
        group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [*prefix, sys.executable, "-m", "tests.trainer.saver", str(path)]
        self.members = [savers.launch(command, **group, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(ranks)]

    def wait_for(self, event: str, step: int | None = None) -> None:
        """Wait until rank 0 has told of something."""
        self.members[0].wait_for(lambda told: told["event"] == event and (step is None or told["step"] == step))

    def uploader(self, rank: int = 0) -> int:
        """Give the process that writes for a rank."""
        (found,) = [pid for pid, words in self.members[rank].processes().items() if any(b"multiprocessing.spawn" in word for word in words)]
        return found

    def end(self) -> list[Told]:
        """Wait for the end of all ranks."""
        return [member.end() for member in self.members]


@pytest.fixture
def savers(gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Savers]:
    for name, value in gateway.environment.items():
        monkeypatch.setenv(name, value)
    savers = Savers(gateway, tmp_path)
    yield savers
    savers.close()


def alive(pid: int) -> bool:
    """Tell whether a process runs; a dead one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


PHASES = {
    "data": r"(PUT|POST) .*step-00000002/\d+/__0_0",
    "metadata": r"(PUT|POST) .*step-00000002/\d+/\.metadata",
    "manifest": r"PUT .*step-00000002/\d+/manifest.json",
    "mark": r"PUT .*step-00000002/COMMITTED",
}


@pytest.mark.parametrize("victim", ["worker", "uploader"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_writer_leaves_the_checkpoint_before(savers: Savers, until: Any, phase: str, victim: str) -> None:
    held = savers.proxy.on(PHASES[phase], hold=True)
    ranks = savers.start([1, 2])
    assert held.reached.wait(SECONDS)
    uploader = ranks.uploader()
    os.kill(uploader if victim == "uploader" else ranks.members[0].process.pid, signal.SIGKILL)
    (told,) = ranks.end()
    until("the end of the uploader", lambda: not alive(uploader), seconds=10)
    held.released.set()
    time.sleep(0.3)

    catalog = savers.catalog()
    assert catalog.committed() == [1]
    assert catalog.verified(1).attempt == 1
    if victim == "uploader":
        assert told.code == 1
        assert "step-00000002/ could not be written" in told.one("error")["message"]
        assert "Traceback" not in told.errors
    for upload in catalog.place.uploads(catalog.prefix):
        catalog.place.abort(upload)
    assert catalog.place.uploads(catalog.prefix) == []

    if (phase, victim) == ("mark", "worker"):
        (again,) = savers.start([2]).end()
        assert again.one("restore")["step"] == 1
        assert catalog.committed() == [2, 1]
        assert catalog.verified(2).attempt == 2, "what the dead one left is no part of it"


def test_a_writer_killed_between_the_mark_and_its_answer_leaves_a_checkpoint(savers: Savers) -> None:
    held = savers.proxy.on(PHASES["mark"], hold=True, answered=True)
    ranks = savers.start([1, 2])
    assert held.reached.wait(SECONDS)
    os.kill(ranks.members[0].process.pid, signal.SIGKILL)
    ranks.end()
    assert savers.catalog().committed() == [2, 1]
    assert savers.catalog().verified(2).step == 2


def test_a_worker_killed_while_it_copies_leaves_the_checkpoint_before(savers: Savers) -> None:
    ranks = savers.start([1, 2], model="byte-3m")
    ranks.wait_for("saving", step=2)
    os.kill(ranks.members[0].process.pid, signal.SIGKILL)
    ranks.end()
    assert savers.catalog().committed() in ([], [1])
    assert all(savers.catalog().verified(step) for step in savers.catalog().committed())


def test_one_killed_uploader_of_two_ends_both_ranks_with_a_reason(savers: Savers) -> None:
    held = savers.proxy.on(r"(PUT|POST) .*step-00000002/\d+/__1_0", hold=True)
    ranks = savers.start([1, 2], ranks=2)
    assert held.reached.wait(SECONDS)
    os.kill(ranks.uploader(rank=1), signal.SIGKILL)
    began = time.monotonic()
    told = ranks.end()
    assert time.monotonic() - began < 20
    assert [rank.code for rank in told] == [1, 1]
    assert "could not be written" in told[0].one("error")["message"]
    assert savers.catalog().committed() == [1]


def test_the_older_of_two_writers_is_superseded_before_its_mark(savers: Savers) -> None:
    held = savers.proxy.on(PHASES["manifest"], hold=True)
    ranks = savers.start([1, 2])
    assert held.reached.wait(SECONDS)
    assert savers.catalog().claim() == 2
    held.released.set()
    (told,) = ranks.end()
    assert told.code == 48
    assert "attempt 2" in told.one("error")["message"]
    assert savers.catalog().committed() == [1]


def test_of_two_writers_of_one_step_the_newer_one_wins(savers: Savers) -> None:
    held = savers.proxy.on(PHASES["mark"], hold=True, times=1)
    older = savers.start([1, 2])
    assert held.reached.wait(SECONDS), "it has looked for newer attempts, and found none"
    (newer,) = savers.start([2]).end()
    assert newer.code == 0, newer.errors
    held.released.set()
    (told,) = older.end()
    assert told.code == 48
    assert "COMMITTED exists" in told.one("error")["message"]
    assert savers.catalog().verified(2).attempt == 2


def test_a_store_in_trouble_is_waited_for_and_one_that_refuses_is_told(savers: Savers) -> None:
    busy = savers.proxy.on(r"(PUT|POST) .*step-00000001/", status=503, times=4)
    cut = savers.proxy.on(r"PUT .*step-00000002/\d+/__0_0", cut=100_000, times=1)
    slow = savers.proxy.on(r"step-00000003/", delay=0.5)
    denied = savers.proxy.on(r"(PUT|POST) .*step-00000004/\d+/__0_0", status=403)
    (told,) = savers.start([1, 2, 3, 4]).end()
    assert [event["step"] for event in told.named("checkpoint")] == [1, 2, 3]
    assert (busy.seen, cut.seen) == (4, 1)
    assert slow.seen >= 4
    assert denied.seen
    assert told.code == 1
    assert "step-00000004/ could not be written" in told.one("error")["message"]
    assert "Traceback" not in told.errors
    assert savers.catalog().committed() == [3, 2, 1]


def test_another_mesh_gets_the_same_state(savers: Savers) -> None:
    synchronous = {"checkpoint": {"asynchronous": False}}
    (two, _) = savers.start([1, 2], ranks=2).end()
    saved = two.one("ended")
    assert [event["step"] for event in two.named("checkpoint")] == [1, 2]
    for ranks, mesh, batch in ((1, {}, 8), (4, {"shard": 2, "tensor": 2}, 4), (2, {"pipeline": 2}, 4)):
        train = {"batch_size": batch, "accumulation": 2 if mesh.get("pipeline") else 1}
        told = savers.start([], ranks=ranks, mesh=mesh, train=train, **synchronous).end()[0]
        assert told.code == 0, told.errors
        begun = told.one("begun")
        assert begun["digests"] == saved["digests"]
        assert begun["drawn"][:2] == saved["drawn"][:ranks], "each rank goes on with its random numbers"


def test_a_mounted_path_holds_the_same_as_a_bucket(savers: Savers, tmp_path: Path) -> None:
    folder = tmp_path / "volume"
    folder.mkdir()
    (told,) = savers.start([1, 2], checkpoint={"folder": str(folder)}).end()
    assert told.code == 0, told.errors
    catalog = Catalog(Folder(str(folder)), savers.run)
    assert catalog.committed() == [2, 1]
    assert catalog.verified(2).bytes == told.named("checkpoint")[1]["bytes"]
    shard = folder / f"runs/{savers.run}/checkpoints/step-00000002/000001/__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    (again,) = savers.start([], checkpoint={"folder": str(folder)}).end()
    assert str(shard.relative_to(folder)) in again.one("skipped")["reason"]
    assert again.one("restore")["step"] == 1
    assert catalog.committed() == [1]


def test_too_little_shared_memory_makes_saves_synchronous(savers: Savers) -> None:
    if subprocess.run([*TINY_SHARED_MEMORY, "true"], capture_output=True, check=False).returncode:
        pytest.skip("may not mount a small /dev/shm here")
    (told,) = savers.start([1], prefix=tuple(TINY_SHARED_MEMORY)).end()
    assert told.code == 0, told.errors
    assert "/dev/shm" in told.one("degraded")["reason"]
    saved = told.one("checkpoint")
    assert saved["stall_seconds"] == saved["seconds"]
    assert savers.catalog().verified(1).step == 1


def test_every_kind_of_damage_is_passed_over_and_named(savers: Savers) -> None:
    (told,) = savers.start([1, 2, 3, 4, 5, 6, 7]).end()
    assert told.code == 0, told.errors
    catalog, client = savers.catalog(), savers.gateway.client
    store = catalog.place

    def shard(step: int) -> str:
        return catalog.folder(step, 1) + "__0_0.distcp"

    def flip(step: int) -> None:
        content = bytearray(store.get(shard(step)))
        content[len(content) // 2] ^= 1
        store.put(shard(step), bytes(content))

    flip(7)
    store.put(shard(6), store.get(shard(6))[:-1])
    store.delete(shard(5))
    store.delete(catalog.folder(4, 1) + "manifest.json")
    store.put(catalog.step_folder(3) + "COMMITTED", b"{")
    catalog.clear(2)
    client.put_object(Bucket=BUCKET, Key=catalog.step_folder(2) + "COMMITTED", Body=b'{"folder": "000001", "manifest_sha256": ""}')

    (again,) = savers.start([]).end()
    assert again.one("restore")["step"] == 1
    reasons = [event["reason"] for event in again.named("skipped")]
    for reason, part in zip(
        reasons,
        ("another SHA-256", "bytes instead of", "is missing", "does not exist", "cannot be understood", "does not exist"),
        strict=True,
    ):
        assert part in reason
    assert (catalog.committed(), catalog.damaged()) == ([1], [7, 6, 5, 4, 3, 2])
    assert again.one("begun")["digests"] != told.one("begun")["digests"]

    flip(1)
    (last,) = savers.start([]).end()
    assert last.code == 47
    assert catalog.committed() == [1], "the mark stays, so that mending the object is enough"
    store.delete(catalog.step_folder(1) + "COMMITTED")
    (gone,) = savers.start([]).end()
    assert gone.code == 47, "there were checkpoints once"


def test_a_repeated_commit_of_the_same_content_is_no_other_writer(savers: Savers) -> None:
    catalog = savers.catalog()
    empty = {key: {} for key in ("mesh", "cursor", "scheduler", "geometry", "config", "identity", "goodput")}
    told = {
        "run": savers.run,
        "attempt": 1,
        "step": 1,
        "reason": "steps",
        "loss": 1.0,
        "validation_loss": None,
        "world_size": 1,
        "time": 0.0,
    }
    manifest = CheckpointManifest.model_validate({**empty, **told})
    catalog.commit(manifest)
    catalog.commit(manifest)
    with pytest.raises(SupersededError):
        catalog.commit(manifest.model_copy(update={"loss": 2.0}))
