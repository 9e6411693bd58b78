import pytest

from local.view.ledger import Ledger
from local.view.narrate import Log, Look, changes, failure, live_line, rate, situation, size
from local.view.waiting import Stage

from .objects import attempt, checkpoint, line

RUNNING = Stage("running")


def look(lines, stage=RUNNING, elapsed=75.0):
    return Look(stage, Ledger.merge(lines), elapsed)


def test_nothing_new_is_nothing_to_say():
    same = look(attempt(1, 0, [10]))
    assert changes(same, same, steps=True) == []


def test_a_new_reason_is_said_once():
    queued = look([], Stage("queued", "in queue research: 2 more needed"))
    again = look([], Stage("queued", "in queue research: 2 more needed"), elapsed=90.0)
    assert changes(None, queued, steps=True) == ["  1m15s  queued: in queue research: 2 more needed"]
    assert changes(queued, again, steps=True) == []


def test_without_a_terminal_each_tenth_of_the_steps_is_one_line():
    told, before = [], look(attempt(1, 0, []))
    for step in range(1, 301):
        now = look(attempt(1, 0, [step]))
        told += [text for text in changes(before, now, steps=True) if "step " in text]
        before = now
    assert len(told) == 10
    assert "step 300/300  loss 2.000  12.0k tokens/s" in told[-1]


def test_on_a_terminal_steps_are_in_the_live_line_alone():
    before, now = look(attempt(1, 0, [10])), look([*attempt(1, 0, [10, 290]), checkpoint(50, 8)])
    assert [text for text in changes(before, now, steps=False) if "step 290" in text] == []
    assert live_line(now) == "  1m15s  training  step 290/300  loss 2.100  12.0k tokens/s  1 checkpoint"


def test_checkpoints_restarts_and_damage_are_told_as_they_happen():
    before = look(attempt(1, 0, [10]))
    after = look(
        [
            *attempt(1, 0, [10]),
            checkpoint(50, 20),
            line("evicted", 30, step=50, saved=True),
            line("skipped", 41, 2, checkpoint="step-00000050", reason="sha256 of __0_0.distcp differs"),
            *attempt(2, 40, [], restored=0),
        ]
    )
    told = "\n".join(changes(before, after, steps=True))
    for words in (
        "checkpoint at step 50: 24.8 MiB in 0.8s",
        "evicted at step 50, saved",
        "sha256 of __0_0.distcp differs",
        "attempt 2 started: 2 processes",
    ):
        assert words in told
    assert told.index("evicted at step") < told.index("attempt 2 started")


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (line("preflight", 9, gigabytes_per_second=1.234, floor=0.005, seconds=0.2), "network between the processes: 1.23 GB/s"),
        (line("compile", 9, seconds=12.0), "first passes over the model took 12.0s"),
        (line("evaluate", 9, step=50, loss=2.5, seconds=0.4), "validation loss at step 50: 2.500"),
        (checkpoint(50, 9, stall_seconds=0.031, reason="steps"), "24.8 MiB in 0.8s, training stood still for 0.03s"),
        (line("good", 9, step=50, loss=2.5, reproduced=2.5), "checkpoint at step 50 is good: loaded back, validation loss 2.500 again"),
        (
            line("advised", 9, step=50, source="rebalance-advice"),
            "the machine may go soon (rebalance-advice): saving, the training goes on",
        ),
        (
            line("degraded", 9, what="keeper", reason="it ended with exit code 1"),
            "degraded, and goes on: keeper: it ended with exit code 1",
        ),
        (line("hang", 9, step=5, rank=1, phase="step", seconds=300.0), "hangs: nothing has moved for 5m00s, rank 1 in step"),
        (line("hang", 9, step=5, message="rank 1 on host-b is late"), "hangs: rank 1 on host-b is late"),
        (line("warning", 9, message="step-00000050 stays, but is not good"), "warning: step-00000050 stays, but is not good"),
        (
            line("evicted", 9, step=50, saved=True, signal="SIGTERM", seconds=1.5, decision="save"),
            "evicted at step 50, saved, 1.5s after the signal (save)",
        ),
        (
            line("evicted", 9, step=50, saved=False, signal="SIGTERM", seconds=9.5, decision="save", problem="s3://b does not answer"),
            "evicted at step 50, not saved, 9.5s after the signal (save): s3://b does not answer",
        ),
    ],
    ids=lambda value: value.split('"')[3] if value.startswith("{") else "",
)
def test_what_the_trainer_does_for_the_run_is_one_line_each(event, words):
    before = look(attempt(1, 0, [10]))
    told = changes(before, look([*attempt(1, 0, [10]), event]), steps=True)
    assert [text for text in told if words in text] == told[:1]


@pytest.mark.parametrize("name", ["goodput", "retained", "metrics"])
def test_what_only_the_report_tells_is_not_told_as_it_happens(name):
    before = look(attempt(1, 0, [10]))
    assert changes(before, look([*attempt(1, 0, [10]), line(name, 9, port=9400)]), steps=True) == []


@pytest.mark.parametrize(
    ("stage", "lines", "word"),
    [
        (Stage("queued"), attempt(1, 0, [10]), "queued"),
        (RUNNING, [], "starting"),
        (RUNNING, attempt(1, 0, [10]), "training"),
        (RUNNING, [*attempt(1, 0, [10]), line("done", 50, step=10, loss=1.0)], "finishing"),
        (RUNNING, [*attempt(1, 0, [10]), line("evicted", 50, step=10, saved=True)], "starting"),
        (RUNNING, [line("prepare", 1, shard=1, shards=3, done=False)], "preparing data"),
        (RUNNING, [*attempt(1, -50, [10]), line("done", -9, step=10), line("prepare", 1, shard=1, shards=3)], "preparing data"),
    ],
)
def test_one_word_for_the_state(stage, lines, word):
    assert situation(stage, Ledger.merge(lines)) == word


def test_a_failure_is_told_in_the_trainers_words():
    ledger = Ledger.merge([*attempt(1, 0, []), line("error", 9, code=45, message="data.pattern: no file matches *.pyx")])
    told = failure("smoke", Stage("failed", "Job has reached the specified backoff limit"), ledger, 45, ["Traceback"])
    assert told[0] == "The run smoke has failed: data.pattern: no file matches *.pyx"
    assert "exit code 45: the data cannot be used" in told[1]
    assert "Traceback" not in "\n".join(told)
    assert any("make logs RUN=smoke" in text for text in told)


def test_a_failure_without_a_word_shows_the_code_the_clusters_reason_and_the_end_of_the_log():
    told = "\n".join(failure("smoke", Stage("failed", "backoff limit reached"), Ledger(), 137, ["Killed"]))
    for words in ("exit code 137: killed: out of memory", "backoff limit reached", "    Killed"):
        assert words in told


def test_a_run_kueue_took_out_says_why():
    assert "maximum execution time" in failure("smoke", Stage("deactivated", "exceeded the maximum execution time"), Ledger(), None, [])[0]


def test_a_log_read_again_brings_nothing_new():
    log = Log()
    for text in ["a warning", *attempt(1, 0, [10]), "a warning", *attempt(1, 0, [10]), ""]:
        log.add(text)
    assert len(log.events) == 5
    assert list(log.other) == ["a warning"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (26_000_000, "24.8 MiB"), (3 * 2**40, "3.0 TiB")]
)
def test_sizes(count, text):
    assert size(count) == text


def test_rates():
    assert (rate(999), rate(12_345)) == ("999 tokens/s", "12.3k tokens/s")


def test_what_the_result_will_tell_is_not_told_before_it():
    before = look(attempt(1, 0, [10]))
    lines = [*attempt(1, 0, [10]), checkpoint(10, 20), line("error", 30, code=1, message="boom")]
    assert [text.split()[1] for text in changes(before, look(lines, Stage("failed", "backoff limit")), steps=True)] == ["checkpoint"]
    # A run that is started again has no result yet: the error is news.
    assert any("boom" in text for text in changes(before, look(lines), steps=True))
