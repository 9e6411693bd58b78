import itertools

import pytest

from local.view.ledger import Ledger
from local.view.timeline import timeline

from .objects import ADMITTED, POD, T0, attempt, condition, job, line, pod, run, workload

DONE = line("done", 40, step=20, loss=1.0, seconds=30.0)


def stages(spans):
    return [(span.attempt, span.stage, span.start - T0, span.end - T0, span.open) for span in spans]


def test_a_run_from_the_queue_to_its_end():
    ledger = Ledger.merge([*attempt(1, 10, [10, 20]), DONE])
    assert stages(timeline(ledger, run(job(condition("Complete")), ADMITTED, [pod("Succeeded")]), T0 + 99)) == [
        (1, "queued", 0, 3, False),
        (1, "scheduling", 3, 5, False),
        (1, "image", 5, 9, False),
        (1, "rendezvous", 9, 12, False),
        (1, "first step", 12, 16, False),
        (1, "training", 16, 40, False),
    ]


def test_without_the_cluster_the_events_alone_make_the_line():
    ledger = Ledger.merge([*attempt(1, 10, [10]), DONE])
    assert [span[1:] for span in stages(timeline(ledger, None, T0 + 99))] == [
        ("rendezvous", 10, 12, False),
        ("first step", 12, 16, False),
        ("training", 16, 40, False),
    ]


def test_a_restart_waits_from_the_end_of_the_attempt_before():
    lines = [*attempt(1, 10, [10]), line("evicted", 20, step=10, saved=True), *attempt(2, 50, [20], pod="smoke-2", restored=10)]
    admitted = workload(condition("Admitted", seconds=30))
    second = pod("Running", condition("PodScheduled", seconds=41), name="smoke-2", uid="pod-2", created=40)
    second["status"]["containerStatuses"][0]["state"] = {"running": {"startedAt": "2027-01-15T08:00:45Z"}}
    spans = stages(timeline(Ledger.merge(lines), run(job(), admitted, [second]), T0 + 70))
    assert [span for span in spans if span[0] == 2] == [
        (2, "queued", 20, 30, False),
        (2, "scheduling", 30, 41, False),
        (2, "image", 41, 45, False),
        (2, "rendezvous", 45, 52, False),
        (2, "first step", 52, 56, False),
        (2, "training", 56, 70, True),
    ]
    # The first attempt's own admission is forgotten by the cluster; its time is not given to a later one.
    assert [span for span in spans if span[0] == 1] == [
        (1, "rendezvous", 0, 12, False),
        (1, "first step", 12, 16, False),
        (1, "training", 16, 20, False),
    ]


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        (run(job(suspend=True)), [("queued", True)]),
        (run(job(), ADMITTED), [("queued", False), ("scheduling", True)]),
        (run(job(), ADMITTED, [pod("Pending", state={"waiting": {}})]), [("queued", False), ("scheduling", False), ("image", True)]),
        (run(job(), ADMITTED, [pod()]), [("queued", False), ("scheduling", False), ("image", False), ("rendezvous", True)]),
    ],
)
def test_before_the_first_event_the_open_stage_is_the_one_it_waits_in(objects, expected):
    assert [(span.stage, span.open) for span in timeline(Ledger(), objects, T0 + 20)] == expected


def test_an_attempt_that_fails_before_its_first_step_ends_in_the_stage_it_had_come_to():
    lines = [line("start", 10, 1, pod=POD), line("rendezvous", 12, 1), line("error", 15, 1, code=45, message="no shards")]
    assert stages(timeline(Ledger.merge(lines), None, T0 + 99))[-1] == (1, "first step", 12, 15, False)


def test_whole_seconds_of_the_cluster_never_make_a_stage_negative():
    lines = attempt(1, 9.2, [10])
    late = pod("Running", condition("PodScheduled", seconds=10))
    spans = timeline(Ledger.merge(lines), run(job(), ADMITTED, [late]), T0 + 30)
    assert all(span.seconds >= 0 for span in spans)
    assert all(left.end == right.start for left, right in itertools.pairwise(spans))


def test_an_attempt_of_an_earlier_job_takes_nothing_from_the_new_one():
    lines = [*attempt(1, -500, [10], pod="old"), line("evicted", -400, 1, step=10, saved=True), *attempt(2, 10, [20])]
    spans = stages(timeline(Ledger.merge(lines), run(job(), ADMITTED, [pod()]), T0 + 30))
    assert spans[0] == (1, "rendezvous", -500, -498, False)
    assert (2, "queued", 0, 3, False) in spans
