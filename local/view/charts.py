"""The charts of a report as inline SVG: they scale, take the page's colours, and say in words what they show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from local.progress import clock
from local.view.goodput import Part
from local.view.ledger import Checkpoint, Point
from local.view.timeline import Span

_WIDTH, _HEIGHT = 860, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 34
_MOST_POINTS = 1200
_ROW, _NAMES, _TIMES = 24, 150, 70


def line_chart(
    name: str,
    points: Sequence[Point],
    unit: str,
    checkpoints: Sequence[Checkpoint] = (),
    restarts: Sequence[int] = (),
    *,
    beside: Sequence[Point] = (),
    from_zero: bool = False,
) -> str:
    """Return a line over the steps, with its checkpoints, the steps at which the run was started again, and a second line `beside` it."""
    if not points:
        return f'<p class="none">No {escape(name.lower())} yet.</p>'
    thinned = [*points[:: max(1, math.ceil(len(points) / _MOST_POINTS))], points[-1]]
    values = [p.value for p in (*points, *beside)]
    ticks = _ticks(0.0 if from_zero else min(values), max(values))
    steps = _ticks(0, max(points[-1].step, 1))
    x = _scale(0, max(points[-1].step, 1), _LEFT, _WIDTH - _RIGHT)
    y = _scale(ticks[0], ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    floor = _HEIGHT - _BOTTOM
    lines = _axes(x, y, [t for t in steps if t <= points[-1].step], ticks)
    lines += [
        f'<line class="restart" x1="{x(s):.1f}" x2="{x(s):.1f}" y1="{_TOP}" y2="{floor}"><title>started again at step {s}</title></line>'
        for s in restarts
    ]
    path = " ".join(f"{x(p.step):.1f},{y(p.value):.1f}" for p in thinned)
    lines.append(
        f'<polyline class="line" points="{path}"/>'
        if len(thinned) > 2
        else f'<circle class="dot" cx="{x(points[0].step):.1f}" cy="{y(points[0].value):.1f}" r="3"/>'
    )
    inside = [p for p in beside if p.step <= points[-1].step]
    if len(inside) > 1:
        lines.append(f'<path class="second" d="M{" ".join(f"{x(p.step):.1f} {y(p.value):.1f}" for p in inside)}"/>')
    lines += [
        f'<circle class="second dot" cx="{x(p.step):.1f}" cy="{y(p.value):.1f}" r="3"><title>step {p.step}: {p.value:.4g}</title></circle>'
        for p in inside
    ]
    lines += [
        f'<path class="mark" d="M{x(c.step):.1f} {floor - 9}l5 9h-10z"><title>checkpoint at step {c.step}</title></path>'
        for c in checkpoints
    ]
    ends = f"From {points[0].value:.4g} at step {points[0].step} to {points[-1].value:.4g} at step {points[-1].step}"
    told = f"{ends}; checkpoints: {len(checkpoints)}, restarts: {len(restarts)}."
    return _svg(name, f"{unit}. {told}", _HEIGHT, lines)


def bar_chart(name: str, spans: Sequence[Span], checkpoints: Sequence[Checkpoint]) -> str:
    """Return the stages of a run as bars over the time since its beginning, one a row."""
    if not spans:
        return '<p class="none">Nothing has begun yet.</p>'
    begun, ended = spans[0].start, max(span.end for span in spans)
    x = _scale(begun, max(ended, begun + 1), _NAMES, _WIDTH - _TIMES)
    several = len({span.attempt for span in spans}) > 1
    lines = []
    for row, span in enumerate(spans):
        top = row * _ROW + 4
        label = f"{span.attempt} · {span.stage}" if several else span.stage
        width = max(x(span.end) - x(span.start), 2)
        css = f"bar {span.stage.replace(' ', '-')}{' open' if span.open else ''}"
        lines += [
            f'<text class="end" x="{_NAMES - 10}" y="{top + 12}">{escape(label)}</text>',
            f'<rect class="{css}" x="{x(span.start):.1f}" y="{top}" width="{width:.1f}" height="{_ROW - 8}" rx="3"/>',
            f'<text x="{x(span.start) + width + 6:.1f}" y="{top + 12}">{clock(span.seconds)}</text>',
        ]
        at = f'y="{top}" width="2" height="{_ROW - 8}"'
        inside = [c for c in checkpoints if span.stage == "training" and span.start <= c.time <= span.end]
        lines += [f'<rect class="tick" x="{x(c.time):.1f}" {at}><title>checkpoint at step {c.step}</title></rect>' for c in inside]
    told = ", ".join(f"{span.stage} {clock(span.seconds)}" for span in spans[:12])
    return _svg(name, told, len(spans) * _ROW + 8, lines)


def stacked_bar(name: str, parts: Sequence[Part]) -> str:
    """Return the parts of a whole as one bar, in their order."""
    x = _scale(0.0, 1.0, 1, _WIDTH - 1)
    lines, at = [], 0.0
    for part in parts:
        left, width = x(at), x(at + part.share) - x(at)
        told = f"{part.name.replace('_', ' ')} {clock(part.seconds)}, {part.share:.1%}"
        lines.append(
            f'<rect class="c-{escape(part.name)}" x="{left:.1f}" y="4" width="{width:.1f}" height="34"><title>{escape(told)}</title></rect>'
        )
        at += part.share
    told = ", ".join(f"{part.name.replace('_', ' ')} {part.share:.1%}" for part in parts)
    return _svg(name, told, 44, lines)


def _axes(x: Callable[[float], float], y: Callable[[float], float], across: Sequence[float], up: Sequence[float]) -> list[str]:
    lines = [f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>' for t in up]
    lines += [f'<text class="end" x="{_LEFT - 8}" y="{y(t) + 4:.1f}">{t:,.10g}</text>' for t in up]
    return lines + [f'<text class="mid" x="{x(t):.1f}" y="{_HEIGHT - _BOTTOM + 18}">{t:,.10g}</text>' for t in across]


def _svg(name: str, description: str, height: int, lines: Sequence[str]) -> str:
    identity = "chart-" + "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    head = f'<title id="{identity}">{escape(name)}</title><desc id="{identity}-text">{escape(description)}</desc>'
    labelled = f'role="img" aria-labelledby="{identity} {identity}-text"'
    return f'<svg viewBox="0 0 {_WIDTH} {height}" {labelled}>{head}\n{chr(10).join(lines)}\n</svg>'


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / ((high - low) or 1) * (end - start)


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers, some five of them, from at most `low` to at least `high`."""
    spread = (high - low) or abs(high) or 1.0
    rough = spread / 4
    magnitude = 10 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 10) for index in range(first, max(last, first + 1) + 1)]
