import re
from html.parser import HTMLParser

import pytest

from local.view.ledger import Ledger
from local.view.report import page, restart_steps, write
from local.view.timeline import timeline

from .objects import ADMITTED, T0, attempt, checkpoint, condition, job, line, pod, run, warning

VOID = {"meta", "br", "hr", "img", "input", "link"}
NASTY = "<script>alert('x')</script>"


class Page(HTMLParser):
    """The elements of a page; it fails on an element that is not closed where it should be."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.text = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def every(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def restarted():
    first = [*attempt(1, 10, range(5, 105, 5)), checkpoint(50, 26), checkpoint(100, 36), line("evicted", 40, step=104, saved=False)]
    second = [*attempt(2, 60, range(105, 305, 5), pod="smoke-2", restored=100), checkpoint(300, 108, 2)]
    return Ledger.merge(first, second, [line("done", 110, 2, step=300, loss=2.0, seconds=50.0)])


@pytest.fixture
def objects():
    return run(job(condition("Complete")), ADMITTED, [pod("Succeeded")], [warning("pod-1", "Back-off pulling image", "BackOff")])


def report_of(ledger, objects_=None, name="smoke", state="completed"):
    return page(name, ledger, objects_, timeline(ledger, objects_, T0 + 200), state)


def test_a_report_is_well_formed_and_needs_nothing_else(restarted, objects):
    text = report_of(restarted, objects)
    parsed = Page(text)
    assert not re.search(r"(https?:)?//[a-z]", text.replace("s3://", ""))
    assert [tag for tag, _ in parsed.elements if tag in ("script", "link", "img", "iframe")] == []
    assert not any({"src", "href"} & attributes.keys() for _, attributes in parsed.elements)
    assert "prefers-color-scheme: dark" in text


def test_every_chart_says_in_words_what_it_shows(restarted, objects):
    parsed = Page(report_of(restarted, objects))
    charts = parsed.every("svg")
    assert len(charts) == 3
    named = {attributes["id"] for _, attributes in parsed.elements if "id" in attributes}
    assert all(set(chart["aria-labelledby"].split()) <= named for chart in charts)
    assert "From 4.95 at step 5 to 2 at step 300; checkpoints: 3, restarts: 1." in "".join(parsed.text)
    assert len(parsed.every("details")) == 2


def test_checkpoints_and_restarts_are_marked_on_the_curve(restarted, objects):
    assert restart_steps(restarted) == [100]
    parsed = Page(report_of(restarted, objects))
    assert sum(path.get("class") == "mark" for path in parsed.every("path")) == 3
    # On the loss and on the throughput.
    assert sum(mark.get("class") == "restart" for mark in parsed.every("line")) == 2


def test_a_report_says_what_ran_where_its_checkpoints_are_and_what_happened(restarted, objects):
    words = " ".join(Page(report_of(restarted, objects)).text)
    for fact in (
        "localhost/trainer@sha256:feed",
        "abc1234",
        "d1ce",
        "step-00000300",
        "26,000,000",
        "Back-off pulling image",
        "2.000",
        "300 / 300",
    ):
        assert fact in words


def test_a_report_accounts_for_every_second_in_a_bar_and_a_table(restarted, objects):
    told = [line("goodput", 39, 1, seconds={"start": 10.0, "step": 19.0}, wall=29.0)]
    told += [line("goodput", 109, 2, seconds={"start": 6.0, "restore": 4.0, "redone": 5.0, "step": 34.0}, wall=49.0)]
    parsed = Page(report_of(Ledger([*restarted.events, *Ledger.merge(told).events]), objects))
    bar = [rect for rect in parsed.every("rect") if rect["class"].startswith("c-")]
    assert [rect["class"] for rect in bar] == ["c-start", "c-restore", "c-step", "c-redone", "c-eviction_gap"]
    # One beside the other, over the whole width.
    ends = [float(rect["x"]) + float(rect["width"]) for rect in bar]
    assert [float(rect["x"]) for rect in bar[1:]] == pytest.approx(ends[:-1], abs=0.11)
    assert ends[-1] == pytest.approx(859, abs=0.2)
    words = " ".join(parsed.text)
    for fact in ("53.0", "53.5%", "21.0", "21.2%", "in all", "99.0", "100.0%"):
        assert fact in words
    assert len(parsed.every("svg")) == 4


def test_a_report_shows_validation_losses_and_what_has_become_of_checkpoints(restarted, objects):
    more = [line("evaluate", 26, step=50, loss=4.75, seconds=0.1), line("evaluate", 36, step=100, loss=4.25, seconds=0.1)]
    more += [line("good", 37, step=100, loss=4.25, reproduced=4.25)]
    more += [line("retained", 38, kept={"100": ["newest", "best"]}, deleted=[50])]
    parsed = Page(report_of(Ledger([*restarted.events, *Ledger.merge(more).events]), objects))
    assert sum(dot.get("class") == "second dot" for dot in parsed.every("circle")) == 2
    assert sum(path.get("class") == "second" for path in parsed.every("path")) == 1
    words = " ".join(parsed.text)
    for fact in ("dots: validation loss", "4.250", "deleted", "newest, best", "yes, 4.2500"):
        assert fact in words


@pytest.mark.parametrize("state", ["queued", "failed"])
def test_a_run_without_a_step_has_a_report(state):
    parsed = Page(report_of(Ledger(), None, state=state))
    assert "No loss yet." in "".join(parsed.text)


@pytest.mark.parametrize("steps", [[5], [5, 10]])
def test_few_points_are_shown(steps):
    parsed = Page(report_of(Ledger.merge(attempt(1, 0, steps, loss=lambda _: 2.0))))
    assert len(parsed.every("polyline")) + len(parsed.every("circle")) == 2


def test_a_long_run_stays_a_small_file():
    lines = attempt(1, 0, range(1, 20_001), total=20_000, loss=lambda step: 2 + 1 / step)
    assert len(report_of(Ledger.merge(lines))) < 120_000


def test_text_of_others_is_never_markup():
    lines = [
        line("start", 0, image=NASTY, git_sha=NASTY, world_size=2, pod=NASTY),
        line("checkpoint", 1, step=1, seconds=1.0, bytes=1, uri=NASTY),
        line("good", 1.5, step=1, loss=1.0, reproduced=1.0),
        line("retained", 1.6, kept={"1": [NASTY]}, deleted=[]),
        line("goodput", 1.7, seconds={NASTY: 1.0, "step": 1.0}, wall=2.0),
        line("error", 2, code=1, message=NASTY),
    ]
    events = [warning("pod-1", NASTY, NASTY, kind=NASTY)]
    text = report_of(Ledger.merge(lines), run(job(), ADMITTED, [pod()], events), name=NASTY, state=NASTY)
    assert Page(text).every("script") == []
    assert "".join(Page(text).text).count(NASTY) >= 7


def test_a_report_is_written_where_it_is_asked_for(tmp_path, restarted):
    path = write("smoke", restarted, None, timeline(restarted, None, T0), tmp_path / "reports", "completed")
    assert path == tmp_path / "reports" / "smoke.html"
    assert Page(path.read_text(encoding="utf-8")).every("svg")
