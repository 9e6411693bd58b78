"""The endpoint, asked as Prometheus asks it, and the identity of a run that it shows."""

import re
import socket
import urllib.request
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from training.config import Checkpoint, Metrics, RunConfig
from training.identity import config_hash, identity
from training.metrics import INFO, PREFIX, TABLE, Exporter, interval

IDENTITY = {"run_id": "smoke", "git_commit": "abc", "image_digest": "sha256:1", "torch": "2.13.0"}


def scrape(port: int) -> dict[str, dict[tuple[str, ...], float]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        family.name: {tuple(value for _, value in sorted(sample.labels.items())): sample.value for sample in family.samples}
        for family in families
    }


@pytest.fixture
def exporter() -> Exporter:
    return Exporter(Metrics(host="127.0.0.1", port=0), IDENTITY)


def test_a_fresh_endpoint_says_what_runs_and_nothing_that_nobody_measured(exporter: Exporter) -> None:
    port = exporter.start()
    assert port
    (info,) = scrape(port).items()
    assert info[0] == f"{PREFIX}run_info"
    assert info[1] == {tuple(IDENTITY.get(key, "") for key in sorted(INFO)): 1.0}


def test_everything_told_is_there_under_its_name(exporter: Exporter) -> None:
    port = exporter.start()
    assert port
    told = {name: {"data": 1.5, "optimizer": 2.5} if label else 7.0 for name, (label, _) in TABLE.items()}
    exporter.tell(**told)
    found = scrape(port)
    for name, (label, _) in TABLE.items():
        samples = found[PREFIX + name.removesuffix("_total")]
        assert samples == ({("data",): 1.5, ("optimizer",): 2.5} if label else {(): 7.0}), name
    assert len(found) == len(TABLE) + 1


def test_what_is_not_known_stays_absent_and_the_last_value_counts(exporter: Exporter) -> None:
    port = exporter.start()
    assert port
    exporter.tell(step=1, mfu_ratio=None, goodput_seconds={"step": 1.0, "restore": 2.0})
    exporter.tell(step=2, goodput_seconds={"step": 3.0})
    found = scrape(port)
    assert found[f"{PREFIX}step"] == {(): 2.0}
    assert found[f"{PREFIX}goodput_seconds"] == {("step",): 3.0, ("restore",): 2.0}
    assert f"{PREFIX}mfu_ratio" not in found


def test_an_unknown_metric_is_a_mistake(exporter: Exporter) -> None:
    with pytest.raises(KeyError):
        exporter.tell(stepp=1)


def test_without_a_port_everything_works_and_nothing_listens() -> None:
    silent = Exporter(Metrics(), IDENTITY)
    assert silent.start() is None
    silent.tell(step=1)


def test_a_port_that_is_taken_stops_no_training(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert Exporter(Metrics(host="127.0.0.1", port=port), IDENTITY).start() is None
    assert f"port {port} of 127.0.0.1 cannot be opened: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("checkpoint", "step_seconds", "expected"),
    [
        ({"every_seconds": 300}, None, 300),
        ({"every_steps": 50}, None, None),
        ({"every_steps": 50}, 2.0, 100),
        ({"every_steps": 50, "every_seconds": 60}, 2.0, 60),
        ({"every_steps": 5, "every_seconds": 60}, 2.0, 10),
    ],
)
def test_the_declared_interval(checkpoint: dict, step_seconds: float | None, expected: float | None) -> None:
    assert interval(Checkpoint(**checkpoint), step_seconds) == expected


RUN: dict[str, Any] = {
    "run": "smoke",
    "bucket": "runs",
    "model": "byte-1m",
    "data": {"name": "text", "prefix": "datasets/text", "source": "/text"},
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
    "processes": 2,
    "grace_seconds": 60,
}


def run(section: str = "", **changes: Any) -> RunConfig:
    return RunConfig.model_validate({**RUN, **({section: {**RUN.get(section, {}), **changes}} if section else changes)})


def test_what_does_not_change_what_is_computed_does_not_change_the_hash() -> None:
    assert re.fullmatch("[0-9a-f]{64}", config_hash(run()))
    same = [run(run="other", bucket="elsewhere", hang_seconds=9, grace_seconds=9, accept_changes=["data", "model"])]
    same += [run("metrics", port=9), run("checkpoint", keep=9), run("data", cache_folder="/cache"), run("train", log_every=9)]
    assert {config_hash(config) for config in same} == {config_hash(run())}


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("", {"model": "byte-2m"}),
        ("", {"processes": 4}),
        ("train", {"seed": 2}),
        ("mesh", {"shard": 2}),
        ("data", {"prefix": "datasets/b"}),
    ],
)
def test_what_changes_what_is_computed_changes_the_hash(section: str, changes: dict[str, Any]) -> None:
    assert config_hash(run(section, **changes)) != config_hash(run())


def test_the_identity_has_all_that_the_metrics_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_IMAGE", "registry:5000/trainer@sha256:1234")
    monkeypatch.setenv("TRAINYARD_GIT_SHA", "abcdef")
    order, dataset = cast(Any, SimpleNamespace(attempt=3)), cast(Any, SimpleNamespace(sha256="feed"))
    found = identity(run(), order, dataset, 1.25)
    assert set(INFO) < set(found)
    assert all(isinstance(value, str) for value in found.values())
    expected = {"run_id": "smoke", "attempt": "3", "git_commit": "abcdef", "image_digest": "sha256:1234", "dataset_version": "feed"}
    expected |= {"world_size": "2", "checkpoint_path": "s3://runs/runs/smoke/checkpoints", "preflight_gigabytes_per_second": "1.250"}
    assert found | expected == found
    assert identity(run("checkpoint", folder="/mnt"), order, dataset)["checkpoint_path"] == "/mnt/runs/smoke/checkpoints"
