"""How the reports of the ranks become one outcome, and what the ledger keeps."""

import io
import json
from pathlib import Path
from typing import Any, cast

import pytest

from training.errors import DONE, EVICTED_SAVED, EVICTED_UNSAVED, NO_USABLE_CHECKPOINT, UNEXPECTED
from training.events import Events
from training.ledger import Ledger
from training.store import Store
from training.work import Outcome, combine

CASES = {
    "all done": ([0, 0], DONE),
    "all evicted and saved": ([42, 42], EVICTED_SAVED),
    "one could not save": ([42, 43], EVICTED_UNSAVED),
    "one could not save, the other did not report": ([43, None], UNEXPECTED),
    "a named reason beats the crash it caused": ([1, 47], NO_USABLE_CHECKPOINT),
    "one killed, the other lost its peer": ([1, None], UNEXPECTED),
    "ranks that disagree": ([0, 42], UNEXPECTED),
}


@pytest.mark.parametrize("case", CASES)
def test_the_outcome_of_a_run(case: str) -> None:
    codes, expected = CASES[case]
    reports = {rank: Outcome(code, f"reason {code}") for rank, code in enumerate(codes) if code is not None}
    assert combine(reports, len(codes)).code == expected


def test_a_killed_rank_is_named_rather_than_the_one_that_lost_it() -> None:
    assert combine({0: Outcome(1, "RuntimeError: connection closed")}, 2).message.startswith("rank 1 of 2 was killed")


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
