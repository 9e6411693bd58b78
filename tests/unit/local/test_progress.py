"""Progress where there is no terminal: a line for each ended task, none for one that was over at once."""

from __future__ import annotations

import io

import pytest

from local.errors import Problem
from local.progress import Progress, clock


@pytest.mark.parametrize(("seconds", "shown"), [(0.04, "0.0s"), (59.94, "59.9s"), (60, "1m00s"), (185.9, "3m05s"), (3720, "1h02m")])
def test_durations_are_written_for_people(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


def test_an_ended_task_leaves_a_line_with_its_last_detail_and_its_time_is_kept() -> None:
    out = io.StringIO()
    progress = Progress(out)
    with progress.running(), progress.task("node", "starting"):
        progress.detail("node", "ready")
    assert out.getvalue().split()[0::2] == ["node", "ready"]
    assert progress.seconds["node"] >= 0


def test_a_task_that_was_over_at_once_may_leave_none() -> None:
    out = io.StringIO()
    with Progress(out).task("node", quiet_under=60):
        pass
    assert not out.getvalue()


def test_a_failed_task_leaves_no_line_of_success() -> None:
    out = io.StringIO()
    with pytest.raises(Problem), Progress(out).task("node"):
        raise Problem("it broke")
    assert not out.getvalue()


def test_a_problem_says_what_where_and_what_to_do() -> None:
    assert str(Problem("it broke", where="here", fix="mend it")) == "it broke\n  where: here\n  do:    mend it"
    assert str(Problem("it broke")) == "it broke"
