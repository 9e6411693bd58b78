"""Attempts, marks and what they promise, on a folder; test_writers.py has the same on S3 with real writers."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from training.catalog import Catalog, CheckpointManifest, DamagedCheckpointError, StoredObject
from training.errors import StoreError, SupersededError
from training.store import ExistsError, Folder, MissingObjectError

DATA = b"weights"


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(Folder(str(tmp_path)), "run")


def write(catalog: Catalog, step: int, attempt: int = 1) -> CheckpointManifest:
    """Write the data of a checkpoint, and give its manifest."""
    catalog.place.put(catalog.folder(step, attempt) + "__0_0.distcp", DATA)
    empty = {key: {} for key in ("mesh", "cursor", "scheduler", "geometry", "config", "identity", "goodput")}
    told = {
        "run": "run",
        "attempt": attempt,
        "step": step,
        "reason": "steps",
        "loss": 2.0,
        "validation_loss": 3.0,
        "world_size": 1,
        "time": 0,
    }
    written = StoredObject(name="__0_0.distcp", bytes=len(DATA), sha256=hashlib.sha256(DATA).hexdigest())
    return CheckpointManifest.model_validate({**empty, **told, "objects": [written.model_dump()]})


def test_no_two_attempts_have_one_number(catalog: Catalog) -> None:
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: catalog.claim(), range(40)))
    assert sorted(numbers) == list(range(1, 41))
    assert catalog.newest_attempt() == 40


def test_a_checkpoint_exists_when_its_mark_does(catalog: Catalog) -> None:
    manifest = write(catalog, 5)
    assert catalog.committed() == []
    catalog.commit(manifest)
    assert catalog.committed() == [5]
    assert catalog.verified(5) == manifest
    assert manifest.bytes == len(DATA)


def test_an_older_attempt_commits_nothing(catalog: Catalog) -> None:
    catalog.claim()
    manifest = write(catalog, 5)
    catalog.claim()
    with pytest.raises(SupersededError, match="attempt 2 of the run run has begun"):
        catalog.commit(manifest)
    assert catalog.committed() == []


def test_a_committed_step_belongs_to_the_first(catalog: Catalog) -> None:
    catalog.commit(write(catalog, 5, attempt=1))
    with pytest.raises(SupersededError, match="another attempt has committed this step"):
        catalog.commit(write(catalog, 5, attempt=2))
    assert catalog.verified(5).attempt == 1


def test_a_foreign_object_prevents_the_commit(catalog: Catalog) -> None:
    manifest = write(catalog, 5)
    catalog.place.put(catalog.folder(5, 1) + "__1_0.distcp", b"of another mesh")
    with pytest.raises(StoreError, match="another process writes there"):
        catalog.commit(manifest)


@pytest.mark.parametrize(
    ("content", "problem"), [(b"Weights", "another SHA-256"), (b"weight", "6 bytes instead of 7"), (None, "is missing")]
)
def test_damage_is_named(catalog: Catalog, content: bytes | None, problem: str) -> None:
    catalog.commit(write(catalog, 5))
    key = catalog.folder(5, 1) + "__0_0.distcp"
    catalog.place.delete(key) if content is None else catalog.place.put(key, content)
    with pytest.raises(DamagedCheckpointError, match=problem):
        catalog.verified(5)


def test_a_manifest_that_was_changed_is_not_believed(catalog: Catalog) -> None:
    catalog.commit(write(catalog, 5))
    key = catalog.folder(5, 1) + "manifest.json"
    catalog.place.put(key, catalog.place.get(key).replace(b'"loss": 2.0', b'"loss": 1.0') + b"\n")
    with pytest.raises(DamagedCheckpointError, match="has not the SHA-256"):
        catalog.manifest(5)


def test_a_step_that_was_passed_over_can_be_committed_again(catalog: Catalog) -> None:
    catalog.commit(write(catalog, 5))
    catalog.mark_good(5, loss_reproduced=3.0)
    assert catalog.good() == [5]
    catalog.pass_over(5, "torn")
    assert (catalog.committed(), catalog.good(), catalog.damaged()) == ([], [], [5])
    catalog.commit(write(catalog, 5, attempt=2))
    assert (catalog.committed(), catalog.good()) == ([5], [])
    assert catalog.verified(5).attempt == 2


def test_good_says_what_was_reproduced(catalog: Catalog) -> None:
    catalog.commit(write(catalog, 5))
    catalog.mark_good(5, loss_reproduced=3.00001)
    told = json.loads(catalog.place.get(catalog.step_folder(5) + "GOOD"))
    assert (told["loss_recorded"], told["loss_reproduced"]) == (3.0, 3.00001)
    mark = json.loads(catalog.place.get(catalog.step_folder(5) + "COMMITTED"))
    assert told["manifest_sha256"] == mark["manifest_sha256"]


def test_a_cleared_step_is_gone(catalog: Catalog, tmp_path: Path) -> None:
    catalog.commit(write(catalog, 5))
    catalog.commit(write(catalog, 6))
    catalog.clear(5)
    assert catalog.committed() == [6]
    assert [path.name for path in (tmp_path / catalog.prefix).iterdir()] == ["step-00000006"]


def test_a_folder_is_a_place_like_a_bucket(tmp_path: Path) -> None:
    place = Folder(str(tmp_path))
    place.check()
    place.put("a/b", b"0123456789")
    place.put_new("a/c", b"1")
    with pytest.raises(ExistsError, match="a/c exists already"):
        place.put_new("a/c", b"2")
    assert place.get("a/c") == b"1"
    assert place.get_range("a/b", 2, 3) == b"234"
    assert place.digest("a/b") == (10, hashlib.sha256(b"0123456789").hexdigest())
    assert [(listed.key, listed.size) for listed in place.listing("a/")] == [("a/b", 10), ("a/c", 1)]
    assert place.listing("none/") == []
    with pytest.raises(MissingObjectError, match="a/d does not exist"):
        place.get("a/d")
    (tmp_path / "a/.partial-left").write_bytes(b"half")
    assert [upload.key for upload in place.uploads("a/")] == ["a/.partial-left"]
    place.abort(place.uploads("a/")[0])
    for key in ("a/b", "a/c", "a/c"):
        place.delete(key)
    assert list(tmp_path.iterdir()) == []


def test_a_volume_that_is_not_mounted_is_explained(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="mount the volume there"):
        Folder(str(tmp_path / "none")).check()
