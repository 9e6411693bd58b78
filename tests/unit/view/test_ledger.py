import math

import pytest

from local.view.ledger import Ledger, Point, parse

from .objects import POD, T0, attempt, checkpoint, line


def test_lines_that_are_no_events_are_passed_over():
    noise = ["", "W1121 torch warned", "[1, 2]", "3", "{not json", '{"event": "step"}', '{"time": 1.0}', '{"event": "x", "time": "noon"}']
    assert [parse(text) for text in noise] == [None] * len(noise)


def test_a_line_in_the_bucket_and_in_the_log_counts_once_whatever_its_order_of_keys():
    stored = '{"event": "step", "time": 5.0, "attempt": 1, "step": 5, "loss": 2.0}'
    live = '{"time": 5.0, "attempt": 1, "loss": 2.0, "step": 5, "event": "step"}'
    assert len(Ledger.merge([stored], [live]).events) == 1


def test_a_run_that_lost_steps_shows_the_values_of_its_last_attempt():
    first = [*attempt(1, 0, [10, 20, 30, 40], loss=lambda step: 100 + step), checkpoint(20, 9.0)]
    second = attempt(2, 60, [30, 40, 50], pod="smoke-2", restored=20, loss=lambda step: 200 + step)
    # The order of arrival says nothing: the bucket is read after the log began.
    ledger = Ledger.merge(second, first)
    assert ledger.series("loss") == [Point(10, 110), Point(20, 120), Point(30, 230), Point(40, 240), Point(50, 250)]
    assert [(a.number, a.outcome, a.pod) for a in ledger.attempts] == [
        (1, "lost", POD),
        (2, "running", "smoke-2"),
    ]
    assert ledger.attempts[0].end == T0 + 9.0
    assert ledger.attempts[1].end is None


@pytest.mark.parametrize(
    ("last", "state", "outcome"),
    [
        (("evicted", {"step": 20, "saved": True, "signal": "SIGTERM"}), "evicted", "evicted"),
        (("done", {"step": 20, "loss": 1.5, "seconds": 30.0}), "completed", "completed"),
        (("error", {"code": 45, "message": "no shards"}), "failed", "failed"),
        (("checkpoint", {"step": 20, "seconds": 1.0, "bytes": 5, "uri": "s3://b/k"}), "training", "running"),
        (("skipped", {"checkpoint": "step-00000010", "reason": "sha256"}), "restoring", "running"),
    ],
)
def test_the_last_event_says_where_a_run_stands(last, state, outcome):
    name, fields = last
    ledger = Ledger.merge([*attempt(1, 0, [10, 20]), line(name, 50, **fields)])
    assert ledger.state.name == state
    assert ledger.attempts[-1].outcome == outcome


def test_the_final_loss_is_that_of_the_done_event():
    ledger = Ledger.merge([*attempt(1, 0, [10, 20], total=22), line("done", 50, step=22, loss=1.25, seconds=44.0)])
    assert (ledger.state.step, ledger.state.steps, ledger.state.loss) == (22, 22, 1.25)


def test_values_that_are_no_numbers_draw_no_points():
    lines = attempt(1, 0, [5, 10, 15], loss=lambda step: {5: 3.0, 10: math.nan, 15: None}[step])
    assert Ledger.merge(lines).series("loss") == [Point(5, 3.0)]


def test_a_checkpoint_written_again_counts_as_it_was_written_last():
    ledger = Ledger.merge([checkpoint(100, 30, 1, size=1), checkpoint(50, 20, 1, size=1), checkpoint(100, 90, 2, size=2)])
    assert [(c.step, c.size, c.attempt) for c in ledger.checkpoints] == [(50, 1, 1), (100, 2, 2)]


def test_a_checkpoint_says_what_has_become_of_it():
    lines = [checkpoint(step, step, reason="steps", stall_seconds=0.02) for step in (50, 100, 150, 200)]
    lines += [
        line("good", 210, step=100, loss=2.5, reproduced=2.25),
        line("retained", 220, kept={"100": ["best", "newest"], "150": ["newest"], "200": ["newest"]}, deleted=[50]),
        line("skipped", 230, 2, checkpoint="s3://b/runs/smoke/checkpoints/step-00000200", reason="sha256 differs"),
        line("good", 240, step=999, loss=1.0, reproduced=1.0),
    ]
    found = Ledger.merge(lines).checkpoints
    assert [(c.step, c.standing, c.good) for c in found] == [
        (50, "deleted", None),
        (100, "best, newest", 2.25),
        (150, "newest", None),
        (200, "damaged", None),
    ]
    assert {(c.reason, c.stall) for c in found} == {("steps", 0.02)}
    # Written again, it is another checkpoint.
    again = Ledger.merge(lines, [checkpoint(200, 250, 2, reason="steps", stall_seconds=0.02)]).checkpoints[-1]
    assert (again.step, again.standing, again.attempt) == (200, "", 2)


def test_validation_losses_are_a_series_of_their_own():
    lines = [*attempt(1, 0, [10, 20]), line("evaluate", 10, step=20, loss=3.5, seconds=0.1), line("evaluate", 40, 2, step=20, loss=3.25)]
    assert Ledger.merge(lines).series("loss", "evaluate") == [Point(20, 3.25)]


def test_an_error_is_forgotten_when_the_run_starts_again():
    failed = [*attempt(1, 0, [10]), line("error", 20, code=1, message="boom")]
    assert Ledger.merge(failed).error.text("message") == "boom"
    assert Ledger.merge(failed, attempt(2, 30, [])).error is None


def test_a_failed_preparation_has_an_error_and_no_attempt():
    ledger = Ledger.merge([line("prepare", 1, shard=1, shards=3, done=False), line("error", 2, code=45, message="no files match *.py")])
    assert ledger.error.text("message") == "no files match *.py"
    assert ledger.attempts == []


def test_the_identity_names_image_code_data_and_size():
    identity = Ledger.merge(attempt(1, 0, [])).identity
    assert identity["image"] == "localhost/trainer@sha256:feed"
    assert identity["dataset sha256"] == "d1ce"
    assert identity["world size"] == "2"
    assert Ledger().identity == {}


def test_an_empty_ledger_waits():
    assert (Ledger().state.name, Ledger().state.loss, Ledger().attempts, Ledger().checkpoints) == ("waiting", None, [], [])
