"""What the keeper does with checkpoints: proves, passes over, deletes, and when it dares. And their export."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from training.catalog import Catalog, CheckpointManifest
from training.checkpoint import Writer, save_now
from training.config import RunConfig
from training.data import Loader
from training.dataset import find_dataset
from training.events import Events
from training.keeper import Keeper, keep
from training.model import Decoder, initialize
from training.models import MODELS
from training.store import Folder, Store, place_of
from training.work import Order, Work

from .gateway import Gateway
from .lab import BUCKET, REPOSITORY, Lab


class Run:
    """A run whose checkpoints are made here, each with weights of its own, and the keeper of its newest attempt."""

    def __init__(self, lab: Lab, name: str, here: Path, **checkpoint: Any) -> None:
        settings = {"every_steps": 10, "keep": 2, "keep_best": 0, "prove": True, **checkpoint}
        content = lab.config(name, checkpoint=settings, data={"cache_folder": str(here / "cache")}, processes=1)
        self.config, self.lab = RunConfig.model_validate(content), lab
        self.path, self.work = here / "run.json", Work(here)
        self.path.write_text(json.dumps(content))
        self.catalog = Catalog(place_of(self.config), name)
        self.attempt = self.catalog.claim()
        loader = Loader(self.config, find_dataset(Store(BUCKET), self.config.data.prefix), data_rank=0)
        self.windows = loader.validation()
        loader.close()

    def decoder(self, step: int) -> Decoder:
        """Give the weights of a step."""
        shape = MODELS[self.config.model]
        decoder = Decoder(shape)
        initialize(decoder, "", shape.layers, step)
        return decoder

    @torch.no_grad()
    def loss(self, step: int) -> float:
        """Compute the validation loss of the weights of a step, all windows at once."""
        return functional.cross_entropy(self.decoder(step)(self.windows[:, :-1]).flatten(0, 1), self.windows[:, 1:].flatten()).item()

    def save(self, *steps: int, validation_loss: float | str | None = "true", **claims: Any) -> None:
        """Commit checkpoints."""
        for step in steps:
            told = self.loss(step) if validation_loss == "true" else validation_loss
            content = {
                "run": self.config.run, "attempt": self.attempt, "step": step, "reason": "steps", "loss": 5.0, "validation_loss": told,
                "world_size": 1, "mesh": {}, "cursor": {"seed": 1, "epoch": 0, "sample": 0}, "scheduler": {}, "time": 0.0,
                "geometry": {"tokenizer": "bytes"}, "config": self.config.model_dump(mode="json"), "identity": {}, "goodput": {},
            }  # fmt: skip
            manifest = CheckpointManifest.model_validate(content | claims)
            uri = self.catalog.place.uri(self.catalog.folder(step, self.attempt)).rstrip("/")
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # that this is one process
                save_now({"model": self.decoder(step).state_dict()}, Writer(uri, self.config, manifest)).result()

    def look(self) -> list[dict[str, Any]]:
        """Let a new keeper look once, and give what it tells."""
        told = io.StringIO()
        Keeper(self.config, Events(self.config.run, self.attempt, told)).look()
        return [json.loads(line) for line in told.getvalue().splitlines()]

    def damage(self, step: int) -> str:
        """Flip a bit, and give the key."""
        (key,) = [listed.key for listed in self.catalog.place.listing(self.catalog.step_folder(step)) if listed.key.endswith(".distcp")]
        self.lab.flip_bit(key)
        return key

    def start(self) -> subprocess.Popen[str]:
        """Start the keeper as the launcher does."""
        self.work.give(Order(self.config.model_dump(mode="json"), self.attempt, time.time(), {}, 0))
        command = [sys.executable, "-m", "training.keeper", "--config", str(self.path), "--work", str(self.work.path)]
        environment = {**os.environ, **self.lab.gateway.environment}
        return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def tell(self, step: int) -> None:
        """Add to the journal what training adds when it has saved."""
        Events(self.config.run, self.attempt, io.StringIO(), self.work.ledger).emit("checkpoint", step=step)


@pytest.fixture
def run(lab: Lab, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    for name, value in lab.gateway.environment.items():
        monkeypatch.setenv(name, value)
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name.removeprefix("test_"))[:40].strip("-")
    return lambda **checkpoint: Run(lab, name, tmp_path, **checkpoint)


def test_a_checkpoint_is_good_when_its_loss_is_reproduced(run: Callable[..., Run]) -> None:
    kept = run()
    kept.save(10)
    good, retained = kept.look()
    assert (good["event"], good["step"], good["loss"]) == ("good", 10, kept.loss(10))
    assert good["reproduced"] == pytest.approx(kept.loss(10), rel=1e-5)
    assert (retained["event"], retained["kept"], retained["deleted"]) == ("retained", {"10": ["newest", "good"]}, [])
    assert kept.catalog.good() == [10]


def test_a_folder_does_as_well_as_a_bucket(run: Callable[..., Run], tmp_path: Path) -> None:
    kept = run(folder=str(tmp_path / "volume"), keep=1)
    (tmp_path / "volume").mkdir(exist_ok=True)
    assert isinstance(kept.catalog.place, Folder)
    kept.save(10, 20)
    assert [event["event"] for event in kept.look()] == ["good", "retained"]
    assert (kept.catalog.good(), kept.catalog.committed()) == ([20], [20])


def test_another_loss_is_passed_over_once_another_one_was_proved(run: Callable[..., Run]) -> None:
    kept = run()
    kept.save(10)
    kept.look()
    kept.save(20, validation_loss=kept.loss(20) * 1.001)
    skipped, *_ = kept.look()
    assert skipped["event"] == "skipped"
    assert "step-00000020" in skipped["checkpoint"]
    assert str(kept.loss(20) * 1.001) in skipped["reason"]
    assert (kept.catalog.committed(), kept.catalog.damaged()) == ([10], [20])


def test_a_proof_that_never_worked_takes_no_checkpoint_away(run: Callable[..., Run]) -> None:
    kept = run()
    kept.save(10, validation_loss=3.0)
    warning, retained = kept.look()
    assert (warning["event"], retained["event"]) == ("warning", "retained")
    assert "is not good" in warning["message"]
    assert (kept.catalog.committed(), kept.catalog.good()) == ([10], [])


def test_weights_that_do_not_fit_are_passed_over(run: Callable[..., Run]) -> None:
    kept = run()
    kept.save(10)
    kept.look()
    kept.save(20, config=kept.config.model_dump(mode="json") | {"model": "byte-2m"})
    skipped, *_ = kept.look()
    assert "cannot be loaded" in skipped["reason"]
    assert kept.catalog.committed() == [10]


def test_a_flipped_bit_is_passed_over_and_nothing_older_goes(run: Callable[..., Run]) -> None:
    kept = run(keep=1, prove=False)
    kept.save(10, 20, 30)
    key = kept.damage(30)
    skipped, retained = kept.look()
    assert key in skipped["reason"]
    assert kept.catalog.damaged() == [30]
    assert (retained["kept"], retained["deleted"]) == ({"20": ["newest"]}, [10])


def test_when_all_are_damaged_none_loses_its_mark(run: Callable[..., Run]) -> None:
    kept = run(keep=1)
    kept.save(10, 20)
    kept.damage(10)
    kept.damage(20)
    assert [event["event"] for event in kept.look()] == ["skipped", "skipped"]
    assert kept.catalog.committed() == [20, 10], "an older version of the objects may be brought back"


def test_the_last_known_good_outlives_newer_ones(run: Callable[..., Run]) -> None:
    kept = run(keep=2)
    kept.save(10)
    kept.look()
    kept.save(20, 30, 40, validation_loss=None)
    (retained,) = kept.look()
    assert retained["kept"] == {"10": ["good"], "30": ["newest"], "40": ["newest"]}
    assert kept.catalog.committed() == [40, 30, 10]
    assert not kept.lab.keys(kept.catalog.step_folder(20))


def test_what_dead_attempts_left_is_removed_and_nothing_else(run: Callable[..., Run], lab: Lab) -> None:
    kept = run(keep=3)
    kept.save(10, 20)
    dead = kept.attempt
    kept.attempt = kept.catalog.claim()
    kept.save(30)
    debris = [kept.catalog.folder(20, kept.attempt), kept.catalog.folder(40, dead), kept.catalog.folder(15, kept.attempt)]
    living = [kept.catalog.folder(40, kept.attempt), kept.catalog.folder(40, kept.attempt + 1)]
    for folder in [*debris, *living]:
        lab.put(folder + "__0_0.distcp", b"half of a checkpoint")
        lab.client.create_multipart_upload(Bucket=BUCKET, Key=folder + "__1_0.distcp")
    before = set(lab.keys(kept.catalog.prefix))
    kept.look()
    assert before - set(lab.keys(kept.catalog.prefix)) == {folder + "__0_0.distcp" for folder in debris}
    assert {upload.key for upload in Store(BUCKET).uploads(kept.catalog.prefix)} == {folder + "__1_0.distcp" for folder in living}


def test_a_keeper_whose_attempt_is_over_touches_nothing(run: Callable[..., Run]) -> None:
    kept = run(keep=1)
    kept.save(10, 20)
    kept.catalog.claim()
    before = kept.lab.keys("runs/" + kept.config.run)
    kept.tell(20)
    kept.work.finished.write_text("20")
    told = io.StringIO()
    events = Events(kept.config.run, kept.attempt, told)
    keep(Keeper(kept.config, events), kept.work, events)
    assert told.getvalue() == ""
    assert kept.lab.keys("runs/" + kept.config.run) == before


def test_the_process_follows_the_journal_and_ends_with_the_training(run: Callable[..., Run], until: Callable[..., Any]) -> None:
    kept = run(keep=1)
    kept.save(10)
    process = kept.start()
    kept.tell(10)
    until("the proof of step 10", lambda: kept.catalog.good() == [10])
    kept.save(20, 30)
    kept.tell(30)
    kept.work.finished.write_text("30")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    told = [json.loads(line) for line in output.splitlines()]
    assert [(event["event"], event.get("step")) for event in told if event["event"] == "good"] == [("good", 10), ("good", 30)], (
        "skipped to the newest"
    )
    assert kept.catalog.committed() == [30]
    journal = [json.loads(line) for line in kept.work.ledger.read_text().splitlines()]
    assert [event for event in journal if event["event"] != "checkpoint"] == told


def test_a_signal_ends_the_process_at_once(run: Callable[..., Run]) -> None:
    kept = run()
    kept.save(10)
    kept.tell(10)
    process = kept.start()
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["event"] == "good"
    process.terminate()
    _, errors = process.communicate(timeout=5)
    assert (process.returncode, errors) == (-signal.SIGTERM, "")


def test_a_store_that_is_gone_gives_one_warning(run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = run()
    kept.save(10)
    gateway = Gateway(tmp_path / "gone")
    gateway.stop()
    kept.lab = Lab.__new__(Lab)
    kept.lab.gateway = gateway
    kept.tell(10)
    kept.work.finished.write_text("10")
    output, errors = kept.start().communicate(timeout=120)
    (warning,) = [json.loads(line) for line in output.splitlines()]
    assert warning["event"] == "warning"
    assert f"{gateway.url} did not answer" in warning["message"]
    assert errors == ""


def command(run: Run, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "training", *words], cwd=REPOSITORY, env={**os.environ}, capture_output=True, text=True, check=False
    )


def test_an_export_holds_the_weights(run: Callable[..., Run], tmp_path: Path) -> None:
    kept = run()
    kept.save(10, 20)
    target = tmp_path / "exported"
    done = command(kept, "export", "--config", str(kept.path), "--step", "10", "--to", str(target))
    assert (done.returncode, done.stderr) == (0, "")
    about = json.loads((target / "config.json").read_text())
    assert (about["model"], about["step"], about["tokenizer"], about["shape"]["dim"]) == ("byte-1m", 10, "bytes", 128)
    assert about["files"] == {"model.safetensors": hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest()}
    mark = json.loads(kept.lab.get(kept.catalog.step_folder(10) + "COMMITTED"))
    assert about["checkpoint_sha256"] == mark["manifest_sha256"]
    expected, found = kept.decoder(10).state_dict(), load_file(target / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    again = command(kept, "export", "--config", str(kept.path), "--to", str(target))
    assert again.returncode == 44
    assert "Traceback" not in again.stderr


def test_a_large_model_is_exported_in_parts(run: Callable[..., Run]) -> None:
    from training.export import export

    kept = run()
    kept.save(10)
    export(kept.config, None, f"s3://{BUCKET}/parts/here", limit=1_000_000)
    index = json.loads(kept.lab.get("parts/here/model.safetensors.index.json"))
    names = sorted({*index["weight_map"].values()})
    assert len(names) > 3
    assert kept.lab.keys("parts/here/") == sorted(f"parts/here/{name}" for name in [*names, "config.json", "model.safetensors.index.json"])
    assert index["weight_map"].keys() == kept.decoder(10).state_dict().keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in kept.decoder(10).state_dict().values())


def test_a_damaged_checkpoint_is_not_exported(run: Callable[..., Run], tmp_path: Path) -> None:
    kept = run()
    nothing = command(kept, "export", "--config", str(kept.path), "--to", str(tmp_path / "exported"))
    assert nothing.returncode == 47
    kept.save(10)
    key = kept.damage(10)
    refused = command(kept, "export", "--config", str(kept.path), "--to", str(tmp_path / "exported"))
    assert refused.returncode == 47
    assert key in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "exported").exists()
