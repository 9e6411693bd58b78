"""Runs that are evicted, killed or robbed of their store, and what is left of them."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from training.goodput import account

from .gateway import Gateway
from .lab import BUCKET, STEPS, Lab, Told


def test_an_evicted_run_ends_where_the_straight_one_does_bit_for_bit(lab: Lab, straight: Told) -> None:
    config = lab.config("evicted")
    attempt = lab.start(config)
    attempt.wait_for(lambda event: event["event"] == "step" and event["step"] == 8)
    first = attempt.signal(signal.SIGTERM).end()

    assert first.code == 42, first.errors
    evicted = first.one("evicted")
    assert (evicted["saved"], evicted["signal"]) == (True, "SIGTERM")
    assert evicted["step"] in lab.checkpoints("evicted")
    assert 8 <= evicted["step"] < STEPS

    second = lab.run(config)
    assert second.code == 0, second.errors
    assert second.one("start")["attempt"] == 2
    assert second.one("restore")["step"] == evicted["step"], "no step is lost"
    assert {**first.losses, **second.losses} == straight.losses
    assert second.one("done")["loss"] == straight.one("done")["loss"]
    assert_every_second_is_accounted_for(lab.ledger("evicted"))
    assert sorted(map(str, lab.ledger("evicted"))) == sorted(map(str, first.events + second.events)), "three processes tell, in any order"


def assert_every_second_is_accounted_for(events: list[dict[str, Any]]) -> None:
    seconds = account(events)
    last = [event["time"] for event in events if event["event"] == "goodput"][-1]
    assert sum(seconds.values()) == pytest.approx(last - events[0]["time"], rel=0.01)
    assert all(
        seconds[name] > 0 for name in ("start", "rendezvous", "compile", "step", "evaluate", "save_stall", "restore", "eviction_gap")
    )


def test_a_killed_rank_costs_the_steps_since_the_checkpoint_and_nothing_else(lab: Lab, straight: Told) -> None:
    config = lab.config("killed")
    attempt = lab.start(config)
    attempt.wait_for(lambda event: event["event"] == "checkpoint" and event["step"] == 12)
    os.kill(attempt.workers()[-1], signal.SIGKILL)
    first = attempt.end()
    assert first.code == 1
    assert "was killed" in first.one("error")["message"]
    durable = lab.checkpoints("killed")[-1]
    assert 12 <= durable < STEPS, "the next one may have been on its way"

    debris = "runs/killed/checkpoints/step-00000018/000001/__7_0.distcp"
    lab.put(debris, b"half of a checkpoint that never was committed")
    second = lab.run(config)

    assert second.code == 0, second.errors
    assert (second.one("start")["attempt"], second.one("restore")["step"]) == (2, durable)
    assert second.one("start")["reached"] == max(first.losses)
    assert debris not in lab.keys("runs/killed/checkpoints/")
    assert lab.checkpoints("killed")[-1] == STEPS
    assert {**first.losses, **second.losses} == straight.losses
    curve = [(event["step"], event["loss"]) for event in lab.ledger("killed") if event["event"] == "step"]
    assert curve == list(straight.losses.items()), "each step is in the ledger once"


def test_a_signal_before_the_first_step_ends_the_run_promptly(lab: Lab, until: Callable[..., object]) -> None:
    attempt = lab.start(lab.config("early"))
    until("workers that load torch", attempt.workers)
    began = time.monotonic()
    told = attempt.signal(signal.SIGTERM).end()
    assert told.code == 43, told.errors
    assert time.monotonic() - began < 30, "half the grace period"
    assert told.one("evicted").items() >= {"step": 0, "saved": False, "signal": "SIGTERM", "decision": "leave"}.items()
    assert lab.ledger("early") == told.events
    until("the end of every process of the attempt", lambda: not attempt.processes(), seconds=20)


@pytest.mark.parametrize("lose_store", [Gateway.stop, Gateway.hang])
def test_an_eviction_that_cannot_save_says_so_within_the_grace_period(
    lab: Lab, prose: Path, tmp_path: Path, lose_store: Callable[[Gateway], None]
) -> None:
    gateway = Gateway(tmp_path / "store")
    gateway.client.create_bucket(Bucket=BUCKET)
    doomed = Lab(gateway, tmp_path / "lab")
    config = doomed.config("doomed", grace_seconds=12, train={"steps": 5000})
    assert doomed.run(config, "training.prepare").code == 0
    attempt = doomed.start(config)
    attempt.wait_for(lambda event: event["event"] == "checkpoint")
    lose_store(gateway)
    began = time.monotonic()
    told = attempt.signal(signal.SIGTERM).end()
    doomed.close()
    gateway.stop()
    assert told.code == 43, told.errors
    assert time.monotonic() - began < 12
    assert told.one("evicted")["saved"] is False
