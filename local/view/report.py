"""The report of a run: one HTML file that needs nothing else, with the curve, the time line, the checkpoints and what exactly ran."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from local.errors import Problem
from local.paths import REPORTS
from local.progress import clock
from local.view.charts import bar_chart, line_chart, stacked_bar
from local.view.cluster import Cluster, RunObjects, event_time
from local.view.goodput import CLASSES, Part, account, share_of_steps
from local.view.ledger import Ledger
from local.view.narrate import rate, situation
from local.view.store import Store
from local.view.timeline import STAGES, Span, timeline
from local.view.waiting import decide, notable

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1b1f24; --soft: #57606a; --rule: #d8dee4; --panel: #f6f8fa;
  --line: #0969da; --mark: #1a7f37; --restart: #bc4c00; --good: #1a7f37; --bad: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --ground: #0d1117; --text: #e6edf3; --soft: #9198a1; --rule: #30363d; --panel: #151b23;
  --line: #58a6ff; --mark: #3fb950; --restart: #f0883e; --good: #3fb950; --bad: #ff7b72; } }
body { margin: 0 auto; max-width: 58rem; padding: 2rem 1.2rem 4rem; background: var(--ground); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.4rem 0 .6rem; }
.state { color: var(--soft); margin: .2rem 0 1.4rem; } .completed { color: var(--good); } .failed, .deactivated { color: var(--bad); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .8rem; margin: 0; }
.facts div { background: var(--panel); border: 1px solid var(--rule); border-radius: 8px; padding: .6rem .8rem; }
.facts dt { color: var(--soft); font-size: .8rem; } .facts dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.error { border-left: 4px solid var(--bad); background: var(--panel); padding: .6rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; overflow-wrap: break-word; }
th { color: var(--soft); font-weight: 600; } .number { text-align: right; } code { font-size: .85rem; overflow-wrap: anywhere; }
.legend, .none, caption, summary { color: var(--soft); font-size: .85rem; text-align: left; } summary { cursor: pointer; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
svg .end { text-anchor: end; } svg .mid { text-anchor: middle; } .grid { stroke: var(--rule); }
.line { fill: none; stroke: var(--line); stroke-width: 2; stroke-linejoin: round; } .dot { fill: var(--line); }
.mark, .tick { fill: var(--mark); } .restart { stroke: var(--restart); stroke-dasharray: 5 4; stroke-width: 1.5; }
.bar { fill: var(--soft); opacity: .55; } .bar.training { fill: var(--line); opacity: .8; } .bar.open { opacity: .3; }
.second { fill: none; stroke: var(--restart); stroke-width: 1.5; } .second.dot { fill: var(--restart); }
.swatch { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .5rem; vertical-align: -.05rem; }
.c-step { fill: #2da44e; background: #2da44e; } .c-start { fill: #8c959f; background: #8c959f; }
.c-preflight { fill: #6e7781; background: #6e7781; } .c-rendezvous { fill: #afb8c1; background: #afb8c1; }
.c-compile { fill: #a475f9; background: #a475f9; } .c-data_wait { fill: #d4a72c; background: #d4a72c; }
.c-redone { fill: #fb8f44; background: #fb8f44; } .c-evaluate { fill: #54aeff; background: #54aeff; }
.c-save_stall { fill: #e85aad; background: #e85aad; } .c-restore { fill: #339d9b; background: #339d9b; }
.c-eviction_gap { fill: #cf222e; background: #cf222e; }
"""


def report(run: str, kubeconfig: str | Path, store: Store, folder: Path = REPORTS) -> Path:
    """Write the report of a run as it stands now and return its path."""
    cluster = Cluster(kubeconfig)
    objects = {one.role: one for one in cluster.runs(run)}
    ledger = Ledger.merge(store.ledger_lines(run), cluster.said(objects.values()))
    if not objects and not ledger.events:
        raise Problem(f"No run named {run} is deployed, and none has left a ledger.", where=f"bucket {store.bucket}", fix="make status")
    stage, decisive = decide(objects, ledger)
    return write(run, ledger, decisive, timeline(ledger, decisive, time.time()), folder, situation(stage, ledger))


def write(run: str, ledger: Ledger, objects: RunObjects | None, spans: Sequence[Span], folder: Path, state: str) -> Path:
    """Write the report of a run and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run}.html"
    path.write_text(page(run, ledger, objects, spans, state), encoding="utf-8")
    return path


def page(run: str, ledger: Ledger, objects: RunObjects | None, spans: Sequence[Span], state: str) -> str:
    """Return the report of a run as one HTML document."""
    restarts = restart_steps(ledger)
    loss, throughput = ledger.series("loss"), ledger.series("tokens_per_second")
    error = ledger.error
    sections = [
        f"<header><h1>{escape(run)}</h1><p class='state'>{_summary(ledger, state)}</p></header>",
        _facts(ledger, spans),
        f'<p class="error">{escape(error.text("message"))}</p>' if error else "",
        _section(
            "Loss",
            line_chart(
                "Loss", loss, "Nats per token over the steps", ledger.checkpoints, restarts, beside=ledger.series("loss", "evaluate")
            ),
            _legend(ledger, restarts),
        ),
        _section("Throughput", line_chart("Throughput", throughput, "Tokens per second over the steps", restarts=restarts, from_zero=True)),
        _goodput(account(ledger)),
        _section("Time line", bar_chart("Time line", spans, ledger.checkpoints), _span_table(spans)),
        _section("Checkpoints", _checkpoint_table(ledger)),
        _section("What ran", _table("What exactly ran", (), [(label, _code(value)) for label, value in ledger.identity.items()])),
        _section("Events that matter", _event_table(objects)),
    ]
    body = "\n".join(filter(None, sections))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run)}: {escape(state)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def restart_steps(ledger: Ledger) -> list[int]:
    """Return the steps from which the run went on after each start but the first."""
    restored = [attempt.first("restore") for attempt in ledger.attempts[1:]]
    return [event.integer("step") if event else 0 for event in restored]


def _summary(ledger: Ledger, state: str) -> str:
    begun = f", first started {_when(ledger.attempts[0].start)}" if ledger.attempts else ""
    return f'<span class="{escape(state.split()[0])}">{escape(state)}</span>{begun}'


def _facts(ledger: Ledger, spans: Sequence[Span]) -> str:
    state, validation = ledger.state, ledger.series("loss", "evaluate")
    facts = {
        "final loss" if state.name == "completed" else "loss": f"{state.loss:.3f}" if state.loss is not None else "",
        "validation loss": f"{validation[-1].value:.3f}" if validation else "",
        "steps": f"{state.step} / {state.steps}" if state.steps else "",
        "throughput": rate(state.tokens_per_second) if state.tokens_per_second else "",
        "goodput": share_of_steps(account(ledger)),
        "checkpoints": str(len(ledger.checkpoints)),
        "attempts": str(len(ledger.attempts)),
        "from queue to end": clock(max(span.end for span in spans) - spans[0].start) if spans else "",
    }
    cells = [f"<div><dt>{label}</dt><dd>{escape(value)}</dd></div>" for label, value in facts.items() if value]
    return f'<dl class="facts">{"".join(cells)}</dl>'


def _legend(ledger: Ledger, restarts: Sequence[int]) -> str:
    marks = ["triangles: checkpoints"] if ledger.checkpoints else []
    marks += ["dots: validation loss"] if ledger.every("evaluate") else []
    marks += ["dashed: started again at step " + ", ".join(map(str, restarts))] if restarts else []
    rows = [(str(point.step), f"{point.value:.4f}") for point in ledger.series("loss")]
    shown = rows[:: max(1, len(rows) // 20)]
    table = f"<details><summary>As a table</summary>{_table('Loss, thinned out', ('step', 'loss'), shown)}</details>" if rows else ""
    return f'<p class="legend">{"; ".join(marks)}</p>{table}' if marks else table


def _span_table(spans: Sequence[Span]) -> str:
    rows = [(str(s.attempt), escape(s.stage), STAGES.get(s.stage, ""), _when(s.start), clock(s.seconds)) for s in spans]
    return f"<details><summary>As a table</summary>{_table('Stages', ('attempt', 'stage', 'what happens', 'from', 'took'), rows)}</details>"


def _goodput(parts: list[Part]) -> str:
    """Return the section that accounts for every second, empty where the trainer has told of none."""
    rows = [
        (
            f'<span class="swatch c-{escape(p.name)}"></span>{escape(p.name.replace("_", " "))}',
            CLASSES.get(p.name, ""),
            *_time(p.seconds, p.share),
        )
        for p in parts
    ]
    rows.append(("in all", "", *_time(sum(p.seconds for p in parts), sum(p.share for p in parts))))
    table = _table("Wall time by class, over all attempts", ("class", "what happens", "seconds", "share"), rows)
    return _section("Where the time went", stacked_bar("Where the time went", parts), table) if parts else ""


def _time(seconds: float, share: float) -> tuple[str, str]:
    return f"{seconds:,.1f}", f"{share:.1%}"


def _checkpoint_table(ledger: Ledger) -> str:
    rows = [
        (
            str(c.step),
            escape(c.reason),
            f"{c.size:,}",
            f"{c.seconds:.2f}",
            "" if c.stall is None else f"{c.stall:.3f}",
            escape(c.standing),
            "" if c.good is None else f"yes, {c.good:.4f}",
            _code(c.uri),
        )
        for c in ledger.checkpoints
    ]
    head = ("step", "why", "bytes", "seconds", "stall", "kept as", "good", "where")
    return _table("As written, and what has become of them; good: loaded back, this validation loss reproduced", head, rows)


def _event_table(objects: RunObjects | None) -> str:
    events = notable(objects.events) if objects else []
    rows = [
        (_when(event_time(e)), escape(f"{e['involvedObject'].get('kind', '')}"), escape(e.get("reason", "")), escape(e.get("message", "")))
        for e in events
    ]
    return _table("Warnings and evictions that the cluster still remembers", ("when", "object", "reason", "message"), rows)


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2>\n{chr(10).join(parts)}</section>"


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are HTML already, with words where there are none."""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    if not body:
        return '<p class="none">None.</p>'
    heads = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    return f"<table><caption>{caption}</caption>{f'<thead><tr>{heads}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
