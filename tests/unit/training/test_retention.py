"""Which checkpoints stay, and what may never go."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.config import Checkpoint
from training.retention import is_debris, plan

STEPS = [10, 20, 30, 40, 50, 60]
FALLING: dict[int, float | None] = {step: 5.0 - step / 100 for step in STEPS}
RISING: dict[int, float | None] = {step: 5.0 + step / 100 for step in STEPS}
UNKNOWN: dict[int, float | None] = dict.fromkeys(STEPS)

MILESTONES = {"keep": 1, "keep_best": 0, "milestone_steps": 20}

CASES = {
    "the newest only": ({"keep": 2, "keep_best": 0}, UNKNOWN, [], {50: ["newest"], 60: ["newest"]}),
    "one in two roles": ({"keep": 1, "keep_best": 1}, FALLING, [], {60: ["newest", "best"]}),
    "the best is the oldest": ({"keep": 1, "keep_best": 2}, RISING, [], {10: ["best"], 20: ["best"], 60: ["newest"]}),
    "of equal losses the newest": ({"keep": 1}, dict.fromkeys(STEPS, 3.0) | {60: 4.0}, [], {50: ["best"], 60: ["newest"]}),
    "a loss that is no number is not the best": ({"keep": 1}, FALLING | {50: math.nan, 60: None}, [], {40: ["best"], 60: ["newest"]}),
    "no losses, no best": ({"keep": 1, "keep_best": 3}, UNKNOWN, [], {60: ["newest"]}),
    "all milestones": (MILESTONES, UNKNOWN, [], {20: ["milestone"], 40: ["milestone"], 60: ["newest", "milestone"]}),
    "the newest milestones": (MILESTONES | {"keep_milestones": 2}, UNKNOWN, [], {40: ["milestone"], 60: ["newest", "milestone"]}),
    "only the last good one": ({"keep": 1, "keep_best": 0}, UNKNOWN, [10, 30], {30: ["good"], 60: ["newest"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_roles(case: str) -> None:
    policy, losses, good, kept = CASES[case]
    found = plan(losses, good, 60, Checkpoint.model_validate({"every_steps": 10, **policy}))
    assert found.kept == kept
    assert found.deleted == [step for step in STEPS if step not in kept]


def test_nothing_goes_while_the_newest_one_has_not_been_read_back() -> None:
    policy = Checkpoint(every_steps=10, keep=1, keep_best=0)
    assert plan(UNKNOWN, [], None, policy).deleted == []
    assert plan(UNKNOWN, [], 70, policy).deleted == [], "the one that was read back is gone meanwhile"


def test_one_that_came_meanwhile_stays_and_takes_the_place_of_none() -> None:
    found = plan(UNKNOWN, [], 40, Checkpoint(every_steps=10, keep=2, keep_best=0))
    assert found.kept == {30: ["newest"], 40: ["newest"], 50: [], 60: []}


policies = st.builds(
    Checkpoint,
    every_steps=st.just(1),
    milestone_steps=st.none() | st.integers(1, 9),
    keep=st.integers(1, 5),
    keep_best=st.integers(0, 4),
    keep_milestones=st.none() | st.integers(1, 4),
)
runs = st.dictionaries(st.integers(1, 60), st.none() | st.floats(), max_size=25)


@given(runs, st.sets(st.integers(1, 60)), st.none() | st.integers(1, 60), policies)
def test_whatever_the_run_looks_like(losses: dict[int, float | None], good: set[int], verified: int | None, policy: Checkpoint) -> None:
    found = plan(losses, good, verified, policy)
    assert sorted([*found.kept, *found.deleted]) == sorted(losses), "each is either kept or deleted"
    if found.deleted:
        assert verified in found.kept, "something went although the newest was not proved"
        known = [step for step in losses if step in good and step <= verified]
        assert not known or max(known) in found.kept, "the last-known-good went"
        assert all(step < verified for step in found.deleted)
        assert sum("newest" in roles for roles in found.kept.values()) == min(policy.keep, sum(step <= verified for step in losses))
        again = plan({step: losses[step] for step in found.kept}, good, verified, policy)
        assert again == type(found)(found.kept, []), "what was kept once is kept again"


DEBRIS = {
    "the data of a checkpoint": (20, 1, False),
    "another attempt's for the same step": (20, 2, True),
    "what nobody can tell, the mark being unreadable": (10, 1, False),
    "a dead attempt's, never committed": (40, 1, True),
    "this attempt's, overtaken by a newer one": (15, 3, True),
    "this attempt's, being saved": (40, 3, False),
    "a newer attempt's": (15, 4, False),
}


@pytest.mark.parametrize("case", DEBRIS)
def test_debris(case: str) -> None:
    step, attempt, expected = DEBRIS[case]
    assert is_debris(step, attempt, {10: None, 20: 1, 30: 3}, current=3) is expected


def test_without_a_checkpoint_only_dead_attempts_leave_debris() -> None:
    assert is_debris(5, 1, {}, current=2)
    assert not is_debris(5, 2, {}, current=2)
