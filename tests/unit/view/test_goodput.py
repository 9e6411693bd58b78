import json

import pytest

from local.progress import clock
from local.view.goodput import CLASSES, account, lines, share_of_steps
from local.view.ledger import Ledger
from training import goodput as trainer

from .objects import T0, attempt, line


def told(when, number, wall, /, **seconds):
    return line("goodput", when, number, seconds={**dict.fromkeys(CLASSES, 0.0), **seconds}, wall=wall)


ONCE = [*attempt(1, 1, [1, 2]), told(10, 1, 10.0, start=4.0, step=5.0, data_wait=1.0), line("done", 10.2, 1, step=2)]
LOST = [line("start", 50, 2, world_size=2), line("rendezvous", 53, 2, seconds=3.0)]
AGAIN = [line("start", 101, 3, world_size=2), told(120, 3, 20.0, start=5.0, restore=2.0, redone=3.0, step=10.0)]
OVERTAKEN = [
    line("start", 200, 4),
    told(210, 4, 10.0, step=10.0),
    line("start", 220, 5),
    told(225, 4, 25.0, step=25.0),
    told(230, 5, 10.5, step=10.5),
]


def seconds(*sources):
    return {part.name: part.seconds for part in account(Ledger.merge(*sources))}


def test_the_gap_lies_between_what_was_told_last_and_the_next_beginning():
    assert seconds(ONCE, AGAIN) == pytest.approx(
        {"start": 9.0, "data_wait": 1.0, "step": 15.0, "redone": 3.0, "restore": 2.0, "eviction_gap": 90.0}
    )


@pytest.mark.parametrize("sources", [(ONCE,), (ONCE, AGAIN), (ONCE, LOST, AGAIN), (ONCE, LOST), (ONCE, AGAIN, OVERTAKEN)])
def test_it_is_the_account_of_the_trainer_and_sums_to_the_wall_time(sources):
    ledger = Ledger.merge(*sources)
    theirs = trainer.account([json.loads(event.key) for event in ledger.events])
    assert seconds(*sources) == pytest.approx({name: amount for name, amount in theirs.items() if amount})
    parts = account(ledger)
    assert sum(part.share for part in parts) == pytest.approx(1.0)
    last = max(event.time for event in ledger.events if event.name in ("goodput", "rendezvous"))
    assert sum(part.seconds for part in parts) == pytest.approx(last - T0)


def test_the_classes_are_those_of_the_trainer():
    assert tuple(CLASSES) == trainer.CLASSES


def test_without_a_word_of_it_nothing_is_shown():
    parts = account(Ledger.merge(attempt(1, 0, [1])))
    assert (parts, lines(parts), share_of_steps(parts)) == ([], [], "")


def test_a_table_names_each_class_and_ends_with_all_of_it():
    parts = account(Ledger.merge(ONCE, AGAIN))
    table = lines(parts)
    assert [row.split()[0] for row in table] == ["start", "restore", "data", "step", "redone", "eviction", "in"]
    assert table[-1].split() == ["in", "all", *clock(120.0).split(), "100.0%"]
    assert share_of_steps(parts) == "12%"
