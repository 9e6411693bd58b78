"""What is done with the time before an eviction, how a worker hears of one, and what EC2 is asked."""

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainer.imds import INSTANCE_ACTION, MetadataServer, moment
from training.eviction import EvictionNotice, MetadataService, decide, notice_seconds
from training.work import Notice, Work

# One step takes 1 s, staging 1 s, an upload 6 s, so a save needs (1 + 1 + 6) x 1.25 = 10 s.
TIMES = {"step_seconds": 1.0, "staging_seconds": 1.0, "upload_seconds": 6.0}
UNKNOWN = {"staging_seconds": None, "upload_seconds": None}
DECISIONS = {
    "a save just fits": ({"seconds_left": 10.0, "unsaved_steps": 1}, "save"),
    "a save just does not fit": ({"seconds_left": 9.9, "unsaved_steps": 1}, "leave"),
    "slow steps leave no time": ({"seconds_left": 10.0, "unsaved_steps": 1, "step_seconds": 2.0}, "leave"),
    "slow staging leaves no time": ({"seconds_left": 10.0, "unsaved_steps": 1, "staging_seconds": 2.0}, "leave"),
    "everything is saved": ({"seconds_left": 100.0, "unsaved_steps": 0}, "leave"),
    "everything is in the upload that runs": ({"seconds_left": 100.0, "unsaved_steps": 0, "running": True}, "finish"),
    "the upload that runs just fits": ({"seconds_left": 7.5, "unsaved_steps": 3, "running": True}, "finish"),
    "the upload that runs is nearly done": ({"seconds_left": 1.3, "unsaved_steps": 3, "running": True, "running_seconds": 5.0}, "finish"),
    "the upload that runs cannot be finished": ({"seconds_left": 7.4, "unsaved_steps": 3, "running": True}, "leave"),
    "the upload that runs is already late": ({"seconds_left": 1.0, "unsaved_steps": 0, "running": True, "running_seconds": 9.0}, "finish"),
    "both fit one after the other": ({"seconds_left": 17.5, "unsaved_steps": 3, "running": True}, "save"),
    "both just do not fit": ({"seconds_left": 17.4, "unsaved_steps": 3, "running": True}, "finish"),
    "both fit because one is nearly done": ({"seconds_left": 11.3, "unsaved_steps": 3, "running": True, "running_seconds": 5.0}, "save"),
    "no save yet: try": ({"seconds_left": 0.1, "unsaved_steps": 3, **UNKNOWN}, "save"),
    "the first save runs and holds everything": ({"seconds_left": 0.1, "unsaved_steps": 0, "running": True, **UNKNOWN}, "finish"),
    "the first save runs and more steps were made": ({"seconds_left": 9.0, "unsaved_steps": 2, "running": True, **UNKNOWN}, "save"),
    "no save yet, and no time": ({"seconds_left": 0.0, "unsaved_steps": 3, **UNKNOWN}, "leave"),
    "no time": ({"seconds_left": -1.0, "unsaved_steps": 3, "running": True}, "leave"),
    "nobody said how much time": ({"seconds_left": math.inf, "unsaved_steps": 1}, "save"),
}


@pytest.mark.parametrize("case", DECISIONS)
def test_what_is_done_with_the_time_that_is_left(case: str) -> None:
    given, expected = DECISIONS[case]
    assert decide(**{"running": False, **TIMES, **given}) == expected


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[tuple[Work, EvictionNotice]]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    work = Work(tmp_path)
    yield work, EvictionNotice(work)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_without_a_signal_there_is_all_the_time_in_the_world(heard: tuple[Work, EvictionNotice]) -> None:
    _, notice = heard
    assert (notice.level(), notice.seconds_left(), notice.seconds_since()) == (0, math.inf, 0.0)
    assert notice.source() == "another node", "what the ranks have agreed on must then come from there"


def test_an_advice_and_then_an_eviction(heard: tuple[Work, EvictionNotice]) -> None:
    work, notice = heard
    work.notify(Notice("rebalance-advice", time.monotonic() - 1))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (notice.level(), notice.source(), notice.seconds_left()) == (1, "rebalance-advice", math.inf)
    assert notice.seconds_since() == pytest.approx(1, abs=0.5)

    work.notify(Notice("SIGTERM", time.monotonic(), time.monotonic() + 30))
    os.kill(os.getpid(), signal.SIGTERM)
    assert (notice.level(), notice.source()) == (2, "SIGTERM")
    assert notice.seconds_left() == pytest.approx(30, abs=0.5)

    os.kill(os.getpid(), signal.SIGUSR1)
    assert notice.level() == 2, "an advice does not undo an eviction"


def test_a_later_notice_can_shorten_the_time(heard: tuple[Work, EvictionNotice]) -> None:
    work, notice = heard
    work.notify(Notice("spot-notice", time.monotonic(), time.monotonic() + 115))
    os.kill(os.getpid(), signal.SIGTERM)
    assert notice.seconds_left() > 100
    work.notify(Notice("spot-notice", time.monotonic(), time.monotonic() + 10))
    assert notice.seconds_left() <= 10


def test_a_signal_that_did_not_come_from_the_launcher_counts_too(heard: tuple[Work, EvictionNotice]) -> None:
    _, notice = heard
    os.kill(os.getpid(), signal.SIGTERM)
    assert (notice.level(), notice.source(), notice.seconds_left()) == (2, "SIGTERM", math.inf)
    assert 0 <= notice.seconds_since() < 1


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    server = MetadataServer()
    yield server
    server.stop()


@pytest.fixture
def watch(server: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> MetadataService:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    return MetadataService(server.url, 0.05)


def test_no_news_is_good_news_and_no_proxy_is_asked(server: MetadataServer, watch: MetadataService, until: Callable[..., object]) -> None:
    until("three polls", lambda: server.asked.count(INSTANCE_ACTION) > 2)
    assert (watch.interrupted, watch.advised, watch.problem) == (None, False, "")


def test_a_spot_notice_gives_the_time_of_the_interruption(
    server: MetadataServer, watch: MetadataService, until: Callable[..., object]
) -> None:
    server.interrupt(60)
    until("the notice", lambda: watch.interrupted)
    assert watch.interrupted == pytest.approx(time.monotonic() + 60, abs=3)
    assert not watch.advised


def test_a_recommendation_is_no_interruption(server: MetadataServer, watch: MetadataService, until: Callable[..., object]) -> None:
    server.advise()
    until("the advice", lambda: watch.advised)
    assert watch.interrupted is None


def test_a_service_that_fails_is_asked_again(server: MetadataServer, watch: MetadataService, until: Callable[..., object]) -> None:
    server.news[INSTANCE_ACTION] = "broken, but there"
    until("the notice", lambda: watch.interrupted)
    server.stop()
    until("a word about it", lambda: watch.problem)
    assert server.url in watch.problem


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "nonsense"])
def test_a_service_that_is_not_there_is_told_and_hurts_nobody(address: str, until: Callable[..., object]) -> None:
    service = MetadataService(address, 0.05)
    until("a word about it", lambda: service.problem)
    assert address in service.problem
    assert service.interrupted is None


@pytest.mark.parametrize(("announced", "seconds"), [(30, 30), (3600, 120), (-60, 0)])
def test_the_time_of_a_notice_is_never_trusted_beyond_two_minutes(announced: float, seconds: float) -> None:
    notice = json.dumps({"action": "stop", "time": moment(announced)})
    assert notice_seconds(notice, time.time()) == pytest.approx(seconds, abs=2)


@pytest.mark.parametrize("garbled", ["", "[]", "{}", '{"time": 5}', '{"time": "soon"}'])
def test_a_notice_that_cannot_be_read_is_one_all_the_same(garbled: str) -> None:
    assert notice_seconds(garbled, time.time()) == 120
