"""A run that nothing disturbs."""

import signal
import urllib.request

import pytest

from .lab import EVERY, STEPS, Lab, Told


def test_a_run_learns_and_tells_the_whole_story(straight: Told) -> None:
    assert straight.code == 0, straight.errors
    order = ["start", "data", "rendezvous", "preflight", "model", "compile", "fresh", "evaluate", "checkpoint", "done"]
    first = [event["event"] for event in straight.events]
    assert [first.index(name) for name in order] == sorted(first.index(name) for name in order)
    assert len(straight.named("checkpoint")) == len(straight.named("evaluate")) == STEPS // EVERY
    assert list(straight.losses) == list(range(1, STEPS + 1))
    assert straight.losses[1] == pytest.approx(5.55, abs=0.2), "an untrained model guesses among 256 bytes"
    assert straight.losses[STEPS] < 3.3, "it has learnt which bytes are common"
    assert straight.one("done")["loss"] == straight.losses[STEPS]


def test_only_the_newest_checkpoints_are_kept(lab: Lab, straight: Told) -> None:
    assert [event["step"] for event in straight.named("checkpoint")] == [6, 12, 18, 24]
    assert lab.checkpoints("straight") == [12, 18, 24]
    assert not lab.keys("runs/straight/checkpoints/step-00000006/")


def test_the_ledger_in_the_store_is_what_was_told(lab: Lab, straight: Told) -> None:
    assert lab.ledger("straight") == straight.events


def test_a_finished_run_started_again_is_done_at_once(lab: Lab, straight: Told) -> None:
    lab.branch("straight", "finished", [24])
    again = lab.run(lab.config("finished"))
    assert again.code == 0, again.errors
    assert again.one("restore")["step"] == STEPS
    assert again.one("done")["loss"] == straight.one("done")["loss"]
    assert not again.named("step", "checkpoint")


def test_a_run_continues_on_another_number_of_processes_with_the_same_samples(lab: Lab, straight: Told) -> None:
    lab.branch("straight", "reshaped", [12])
    reshaped = lab.run(lab.config("reshaped", processes=1, train={"batch_size": 8}))
    assert reshaped.code == 0, reshaped.errors
    assert reshaped.one("restore")["step"] == 12
    assert list(reshaped.losses) == list(range(13, STEPS + 1))
    assert reshaped.losses == {step: pytest.approx(straight.losses[step], abs=1e-3) for step in reshaped.losses}


def test_a_running_training_can_be_scraped(lab: Lab) -> None:
    attempt = lab.start(lab.config("scraped", metrics={"host": "127.0.0.1", "port": 0}))
    attempt.wait_for(lambda event: event["event"] == "step" and event["step"] == EVERY + 2)
    (port,) = [event["port"] for event in attempt.told("metrics")]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    told = attempt.signal(signal.SIGTERM).end()
    assert told.code == 42, told.errors
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["trainyard_step"]) > EVERY
    assert float(values["trainyard_loss"]) == pytest.approx(told.losses[int(float(values["trainyard_step"]))])
    assert float(values["trainyard_tokens_per_second_per_gpu"]) > 0
    assert "trainyard_mfu_ratio" not in text, "nobody knows the peak of this processor"
    assert any(line.startswith("trainyard_run_info{") and 'run_id="scraped"' in line and 'world_size="2"' in line for line in values)


def test_the_preparation_runs_once(lab: Lab) -> None:
    again = lab.run(lab.config("straight"), "training.prepare")
    assert again.code == 0, again.errors
    assert [(event["done"], event["unchanged"]) for event in again.named("prepare")] == [(True, True)]
