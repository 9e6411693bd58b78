"""How the reports of the ranks become one outcome, and what the ledger keeps."""

import io
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any, cast

import pytest

from training.errors import DATA, DONE, EVICTED_SAVED, EVICTED_UNSAVED, HUNG, NO_USABLE_CHECKPOINT, SUPERSEDED, UNEXPECTED
from training.events import Events
from training.ledger import Ledger
from training.store import Store
from training.work import Outcome, Work, combine

CASES = {
    "all done": ([0, 0], DONE),
    "all evicted and saved": ([42, 42], EVICTED_SAVED),
    "one could not save": ([42, 43], EVICTED_UNSAVED),
    "one could not save, the other did not report": ([43, None], UNEXPECTED),
    "a named reason beats the crash it caused": ([1, 47], NO_USABLE_CHECKPOINT),
    "one killed, the other lost its peer": ([1, None], UNEXPECTED),
    "ranks that disagree": ([0, 42], UNEXPECTED),
    "a rank that hangs ends without the others": ([None, 49], HUNG),
    "a hang is told rather than the crash it caused": ([1, 49], HUNG),
    "the reason for a hang is told rather than the hang": ([49, 45], DATA),
    "superseded, and the other did not report": ([48, None], SUPERSEDED),
    "superseded rather than hung": ([49, 48], SUPERSEDED),
}


@pytest.mark.parametrize("case", CASES)
def test_the_outcome_of_a_run(case: str) -> None:
    codes, expected = CASES[case]
    reports = {rank: Outcome(code, f"reason {code}") for rank, code in enumerate(codes) if code is not None}
    assert combine(reports, range(len(codes))).code == expected


def test_a_killed_rank_is_named_rather_than_the_one_that_lost_it() -> None:
    assert combine({0: Outcome(1, "RuntimeError: connection closed")}, range(2)).message.startswith("rank 1 was killed")


def test_the_ranks_of_another_node_are_named_by_their_numbers_in_the_run(tmp_path: Path) -> None:
    work = Work(tmp_path)
    work.report(2, Outcome(EVICTED_SAVED))
    assert combine(work.reports(), range(2, 4)).message.startswith("rank 3 was killed")
    work.report(3, Outcome(EVICTED_SAVED))
    assert combine(work.reports(), range(2, 4)) == Outcome(EVICTED_SAVED)


@pytest.mark.parametrize(("code", "hopeless"), [(HUNG, True), (SUPERSEDED, True), (EVICTED_SAVED, False), (UNEXPECTED, False)])
def test_which_ends_the_other_ranks_cannot_be_waited_for(code: int, hopeless: bool, tmp_path: Path) -> None:
    work = Work(tmp_path)
    assert not work.hopeless()
    work.report(1, Outcome(code, "reason"))
    assert work.hopeless() is hopeless


def ledger_with(path: Path, events: list[dict[str, Any]]) -> Ledger:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return Ledger(path, cast(Store, None), "smoke")


def test_going_back_forgets_newer_steps_and_remembers_everything_else(tmp_path: Path) -> None:
    story = [
        {"event": "start", "attempt": 1},
        {"event": "step", "step": 5},
        {"event": "checkpoint", "step": 5},
        {"event": "step", "step": 6},
        {"event": "checkpoint", "step": 7},
        {"event": "skipped", "checkpoint": "step 7"},
    ]
    ledger = ledger_with(tmp_path / "ledger.jsonl", story)
    ledger.rewind(5)
    assert ledger.events() == [event for event in story if event != {"event": "step", "step": 6}]
    assert ledger.last_step() == 7


def test_an_event_is_one_line_of_json_for_the_log_and_for_the_ledger(tmp_path: Path) -> None:
    log = io.StringIO()
    events = Events("smoke", 3, log, tmp_path / "ledger.jsonl")
    events.emit("error", code=44, message="two\nlines")
    (line,) = log.getvalue().splitlines()
    told = json.loads(line)
    assert told.pop("time") == pytest.approx(1.8e9, rel=0.5)
    assert told == {"event": "error", "run": "smoke", "attempt": 3, "code": 44, "message": "two\nlines"}
    assert (tmp_path / "ledger.jsonl").read_text() == line + "\n"


def test_the_highest_step_is_remembered_though_going_back_forgets_it(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path / "ledger.jsonl", [])
    assert ledger.reached() == 0
    story = [
        {"event": "start", "reached": 0},
        {"event": "step", "step": 14},
        {"event": "start", "reached": 14},
        {"event": "restore", "step": 12},
    ]
    ledger = ledger_with(tmp_path / "ledger.jsonl", story)
    ledger.rewind(12)
    assert (ledger.reached(), ledger.last_step()) == (14, 12)


def tell(path: Path, attempt: int, count: int) -> None:
    events = Events("smoke", attempt, io.StringIO(), path)
    for number in range(count):
        events.emit("keeper", number=number, text="x" * 5000)


def test_nothing_that_others_tell_is_lost_while_the_ledger_is_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = ledger_with(path, [{"event": "step", "step": step} for step in range(200)])
    spawn = multiprocessing.get_context("spawn")
    tellers = [spawn.Process(target=tell, args=(path, attempt, 100)) for attempt in (1, 2)]
    for teller in tellers:
        teller.start()
    end = time.monotonic() + 60
    while len(ledger.events()) == 200:
        assert time.monotonic() < end
    for step in range(199, 99, -1):
        ledger.rewind(step)
    for teller in tellers:
        teller.join(60)
        assert teller.exitcode == 0
    told = ledger.events()
    assert [event["step"] for event in told if event["event"] == "step"] == list(range(101))
    for attempt in (1, 2):
        assert [event["number"] for event in told if event.get("attempt") == attempt] == list(range(100))
    assert list(tmp_path.iterdir()) == [path], "nothing is left beside it"


def test_an_event_of_one_of_several_nodes_says_which(tmp_path: Path) -> None:
    log = io.StringIO()
    Events("smoke", 1, log, always={"node": 3}).emit("error", code=1)
    assert json.loads(log.getvalue()) | {"node": 3, "code": 1} == json.loads(log.getvalue())
