"""Evictions at every moment of a run: each is answered at once, costs at most the step at hand, and says what it did."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .gateway import port_for_later
from .imds import MetadataServer
from .lab import STEPS, Attempt, Lab, Told
from .proxy import Proxy

PROMPT_SECONDS = 20  # of a grace period of 60; the machine may be busy with other tests


def end_promptly(attempt: Attempt) -> Told:
    """Wait for the end and insist that it comes soon."""
    began = time.monotonic()
    told = attempt.end()
    assert time.monotonic() - began < PROMPT_SECONDS, told.errors
    return told


def at_step(step: int) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["event"] == "step" and event["step"] == step


def named(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["event"] == name


def saved_nowhere_else(lab: Lab, told: Told) -> int:
    """Check that an eviction saved exactly the step it reached, and give it."""
    assert told.code == 42, told.errors
    evicted = told.one("evicted")
    assert evicted["saved"] is True
    assert lab.checkpoints(evicted["run"])[-1] == evicted["step"]
    return evicted["step"]


@pytest.mark.parametrize("moment", ["start", "model"])
def test_a_signal_while_nothing_can_be_lost_ends_the_run_at_once(lab: Lab, moment: str) -> None:
    attempt = lab.start(lab.config(f"early-{moment}", train={"compile": True}))
    attempt.wait_for(named(moment))  # after "model" the blocks are compiled
    told = end_promptly(attempt.signal(signal.SIGTERM))
    assert told.code == 43, told.errors
    expected = {"step": 0, "saved": False, "signal": "SIGTERM", "decision": "leave"}
    assert told.one("evicted").items() >= expected.items()
    assert not told.named("compile", "fresh", "step")


def test_a_signal_ends_an_evaluation_without_losing_the_step(lab: Lab) -> None:
    config = lab.config("evaluating", train={"evaluate_every": 1}, data={"validation_windows": 10_000})
    attempt = lab.start(config)
    attempt.wait_for(at_step(1))  # its evaluation takes many seconds
    told = end_promptly(attempt.signal(signal.SIGTERM))
    assert saved_nowhere_else(lab, told) == 1
    assert not told.named("evaluate")
    assert told.one("evicted")["decision"] == "save"


@pytest.fixture
def proxy(lab: Lab) -> Iterator[Proxy]:
    proxy = Proxy(lab.gateway.url)
    yield proxy
    proxy.close()


def test_a_signal_during_a_save_lets_it_finish_and_saves_what_came_after(lab: Lab, proxy: Proxy) -> None:
    rule = proxy.on(r"PUT /lab/runs/saving/checkpoints/step-00000050/.*distcp", hold=True)
    attempt = lab.start(lab.config("saving", train={"steps": 5000}, checkpoint={"every_steps": 50}), AWS_ENDPOINT_URL=proxy.url)
    attempt.wait_for(at_step(51))
    assert rule.reached.wait(PROMPT_SECONDS)
    attempt.signal(signal.SIGTERM)
    time.sleep(1)
    assert attempt.process.poll() is None
    rule.released.set()
    told = end_promptly(attempt)
    step = saved_nowhere_else(lab, told)
    assert [(event["step"], event["reason"]) for event in told.named("checkpoint")] == [(50, "steps"), (step, "eviction")]
    assert told.one("evicted")["seconds"] >= 1


def test_a_save_that_would_not_fit_is_not_begun(lab: Lab, proxy: Proxy) -> None:
    rule = proxy.on(r"PUT /lab/runs/too-late/checkpoints/step-00000010/.*distcp", delay=5, times=1)
    config = lab.config("too-late", grace_seconds=9, train={"steps": 5000}, checkpoint={"every_steps": 10})
    attempt = lab.start(config, AWS_ENDPOINT_URL=proxy.url)
    attempt.wait_for(named("checkpoint"))
    assert rule.seen == 1
    told = end_promptly(attempt.signal(signal.SIGTERM))
    evicted = told.one("evicted")
    assert evicted["decision"] == "leave"
    assert evicted["saved"] is (evicted["step"] in lab.checkpoints("too-late"))
    assert told.code == (42 if evicted["saved"] else 43), told.errors


def test_two_signals_are_one_eviction(lab: Lab) -> None:
    attempt = lab.start(lab.config("twice"))
    attempt.wait_for(at_step(3))
    attempt.signal(signal.SIGTERM).signal(signal.SIGTERM).signal(signal.SIGINT)
    assert saved_nowhere_else(lab, end_promptly(attempt)) >= 3


def test_a_signal_when_training_is_done_changes_nothing(lab: Lab) -> None:
    attempt = lab.start(lab.config("done-already"))
    attempt.wait_for(named("done"))
    told = end_promptly(attempt.signal(signal.SIGTERM))
    assert told.code == 0, told.errors
    assert not told.named("evicted", "error")
    assert lab.checkpoints("done-already")[-1] == STEPS


def test_a_signal_ends_the_data_preparation_and_it_can_be_done_again(lab: Lab) -> None:
    config = lab.config("half-prepared", data={"name": "half", "prefix": "datasets/half"})
    attempt = lab.start(config, "training.prepare")
    attempt.wait_for(named("prepare"))
    told = end_promptly(attempt.signal(signal.SIGTERM))
    if not told.named("prepare")[-1]["done"]:
        assert told.code == 128 + signal.SIGTERM
        assert not [key for key in lab.keys("datasets/half/") if key.endswith("manifest.json")]
    assert lab.run(config, "training.prepare").code == 0
    assert [key for key in lab.keys("datasets/half/") if key.endswith("manifest.json")]


@pytest.fixture
def service() -> Iterator[MetadataServer]:
    server = MetadataServer()
    yield server
    server.stop()


def test_an_advice_makes_a_checkpoint_and_a_spot_notice_ends_the_run(lab: Lab, straight: Told, service: MetadataServer) -> None:
    eviction = {"metadata_service": service.url, "poll_seconds": 0.2}
    config = {**lab.config("spot", checkpoint={"every_steps": 1000}, train={"steps": 2000}), "eviction": eviction}
    attempt = lab.start(config)
    attempt.wait_for(at_step(2))
    service.advise()
    attempt.wait_for(named("checkpoint"))
    service.interrupt()
    told = end_promptly(attempt)

    advised, evicted = told.one("advised"), told.one("evicted")
    assert advised["source"] == "rebalance-advice"
    advice, eviction = told.named("checkpoint")
    assert (advice["reason"], advice["step"]) == ("advice", advised["step"])
    assert (eviction["reason"], eviction["step"]) == ("eviction", evicted["step"])
    assert evicted["step"] > advised["step"], "training went on after the advice"
    assert evicted["signal"] == "spot-notice"
    saved_nowhere_else(lab, told)


def test_a_metadata_service_that_does_not_answer_is_told_once(lab: Lab, straight: Told) -> None:
    config = lab.config("no-service")
    config["eviction"] = {"metadata_service": "http://127.0.0.1:9", "poll_seconds": 0.1}
    told = lab.run(config)
    assert told.code == 0, told.errors
    assert told.losses == straight.losses
    (degraded,) = (event for event in told.named("degraded") if event["what"] == "eviction notices")
    assert "http://127.0.0.1:9" in degraded["reason"]


def pair(lab: Lab, run: str) -> tuple[Attempt, Attempt]:
    """Start the launchers of a run on two nodes, which are both this machine."""
    config = {**lab.config(run), "nodes": 2}
    coordinator = f"127.0.0.1:{port_for_later()}"
    second = lab.start(config, JOB_COMPLETION_INDEX="1", TRAINYARD_COORDINATOR=coordinator)
    return lab.start(config, TRAINYARD_NODE_RANK="0", TRAINYARD_COORDINATOR=coordinator), second


def test_two_nodes_train_as_two_processes_of_one_do(lab: Lab, straight: Told) -> None:
    first, second = (attempt.end() for attempt in pair(lab, "two-nodes"))
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    assert first.losses == straight.losses
    assert first.one("done")["loss"] == straight.one("done")["loss"]
    assert {event["event"] for event in second.events} <= {"start", "data", "metrics"}
    assert (first.one("start")["node"], second.one("start")["node"]) == (0, 1)
    assert all(event.get("node", 0) == 0 for event in lab.ledger("two-nodes")), "the ledger is node 0's"
    assert len(lab.keys("runs/two-nodes/attempts/")) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_the_eviction_of_one_node_saves_once_and_ends_all(lab: Lab, which: int) -> None:
    nodes = pair(lab, f"node-{which}-goes")
    nodes[0].wait_for(at_step(3))
    nodes[which].signal(signal.SIGTERM)
    first, second = (end_promptly(attempt) for attempt in nodes)
    step = saved_nowhere_else(lab, first)
    assert second.code == 42, second.errors
    assert [event["step"] for event in first.named("checkpoint") if event["reason"] == "eviction"] == [step]
    assert first.one("evicted")["signal"] == ("SIGTERM" if which == 0 else "another node")
    assert not second.named("evicted", "error")


@pytest.mark.parametrize(("variables", "part"), [({}, "TRAINYARD_NODE_RANK"), ({"TRAINYARD_NODE_RANK": "1"}, "TRAINYARD_COORDINATOR")])
def test_a_node_that_does_not_know_its_place_says_what_to_set(lab: Lab, variables: dict[str, str], part: str) -> None:
    told = lab.run({**lab.config("lost"), "nodes": 2}, **variables)
    assert told.code == 44
    assert part in told.one("error")["message"]
    assert told.errors == ""


def test_a_rank_that_stands_still_ends_the_run_with_its_own_code(lab: Lab, until: Callable[..., object]) -> None:
    config = {**lab.config("stuck", train={"steps": 5000}), "hang_seconds": 4.0}
    attempt = lab.start(config)
    attempt.wait_for(at_step(5))
    os.kill(attempt.workers()[-1], signal.SIGSTOP)
    told = attempt.end()
    assert told.code == 49, told.errors
    assert told.one("error")["message"] == told.one("hang")["message"]
    until("the end of every process of the attempt", lambda: not attempt.processes(), seconds=20)
