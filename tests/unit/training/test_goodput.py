"""Every second has exactly one class, within an attempt and over all of them."""

import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.goodput import CLASSES, Clock, account, share

STEPS = st.floats(0.001, 500.0)


def test_the_seconds_of_a_clock_sum_to_its_wall_time() -> None:
    launched = time.monotonic() - 2.0
    clock = Clock({"start": 2.0}, "rendezvous", time.monotonic())
    for _ in range(50):
        with clock.of("step"), clock.of("data_wait"):
            time.sleep(0.001)
    wall, seconds = time.monotonic() - launched, clock.seconds()
    assert sum(seconds.values()) == pytest.approx(wall, abs=0.01)
    assert set(seconds) == set(CLASSES)


def test_the_outer_class_goes_on_after_the_inner_one_even_when_that_fails() -> None:
    clock = Clock({}, "start", time.monotonic())
    with clock.of("step"):
        with pytest.raises(ValueError, match="torn"), clock.of("data_wait"):
            raise ValueError("torn")
        time.sleep(0.05)
    time.sleep(0.02)
    seconds = clock.seconds()
    assert seconds["step"] == pytest.approx(0.05, abs=0.02)
    assert seconds["start"] == pytest.approx(0.02, abs=0.015)
    assert seconds["data_wait"] < 0.01


def test_a_class_that_is_turned_to_stays() -> None:
    clock = Clock({}, "start", time.monotonic())
    assert clock.turn("restore") == "start"
    time.sleep(0.02)
    assert clock.seconds()["restore"] >= 0.02


def test_another_thread_reads_whole_seconds() -> None:
    began = time.monotonic()
    clock, wrong, ended = Clock({}, "start", began), [], threading.Event()

    def read() -> None:
        while not ended.is_set():
            before = time.monotonic() - began
            total = sum(clock.seconds().values())
            if not before - 1e-6 <= total <= time.monotonic() - began + 1e-6:
                wrong.append(total)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20_000):
        with clock.of("step"):
            pass
    ended.set()
    reader.join()
    assert not wrong


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Draw the events of a run with the seconds that went to each class, known from how they were made."""
    now, events, truth = 1_700_000_000.0, [], dict.fromkeys(CLASSES, 0.0)
    counted = now
    for attempt in range(1, draw(st.integers(1, 6)) + 1):
        if attempt > 1:
            now += draw(STEPS)
        truth["eviction_gap"] += now - counted
        began = counted = now
        events.append({"event": "start", "time": now, "attempt": attempt})
        seconds = dict.fromkeys(CLASSES, 0.0)
        for _ in range(draw(st.integers(0, 4))):
            cls, amount = draw(st.sampled_from(CLASSES[:-1])), draw(STEPS)
            seconds[cls] += amount
            now += amount
            events.append({"event": "goodput", "time": round(now, 3), "attempt": attempt, "seconds": dict(seconds), "wall": now - began})
            counted = now
        now += draw(STEPS)
        events.append({"event": "step", "time": now, "attempt": attempt})
        if not any(seconds.values()):
            seconds["start"] = now - began
            counted = now
        for name in CLASSES:
            truth[name] += seconds[name]
    return events, truth


@settings(max_examples=300)
@given(histories())
def test_the_account_of_any_history_sums_to_its_wall_time(history: tuple[list[dict[str, Any]], dict[str, float]]) -> None:
    events, truth = history
    total = account(events)
    first = events[0]["time"]
    last = [event for event in events if event["attempt"] == events[-1]["attempt"]]
    end = max((event["time"] for event in last if event["event"] == "goodput"), default=last[-1]["time"])
    assert sum(total.values()) == pytest.approx(end - first, rel=0.01, abs=0.05)
    assert total == pytest.approx(truth, rel=0.01, abs=0.05)
    assert all(seconds >= 0 for seconds in total.values())
    assert 0 <= share(total) <= 1


def test_what_a_superseded_attempt_does_beside_its_successor_is_not_counted_twice() -> None:
    def goodput(attempt: int, moment: float, wall: float) -> dict[str, Any]:
        return {"event": "goodput", "attempt": attempt, "time": moment, "seconds": {"step": wall}, "wall": wall}

    first = [{"event": "start", "attempt": 1, "time": 0.0}, *(goodput(1, float(moment), float(moment)) for moment in range(10, 100, 10))]
    second = [{"event": "start", "attempt": 2, "time": 55.0}, goodput(2, 105.0, 50.0)]
    total = account(first + second)
    assert total["step"] == 100.0
    assert total["eviction_gap"] == 5.0


def test_no_events_make_no_account() -> None:
    assert account([]) == dict.fromkeys(CLASSES, 0.0)
    assert share(account([])) == 0.0
