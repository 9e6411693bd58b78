"""The loss curve in a terminal: braille dots where the encoding has them, ASCII elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import TextIO

from local.view.ledger import Point

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot of a braille cell, by row and column."""
_CYAN, _PLAIN = "\x1b[36m", "\x1b[0m"
_SMALLEST = (24, 4)


def draw(points: Sequence[Point], width: int = 78, height: int = 12, *, unicode: bool = True, colour: bool = False) -> list[str]:
    """Return the lines of a plot of `width` columns and `height` rows, axes included; none without a point."""
    if not points:
        return []
    width, height = max(width, _SMALLEST[0]), max(height, _SMALLEST[1])
    low, high = min(point.value for point in points), max(point.value for point in points)
    labels = _labels(low, high, height - 2)
    margin = max(map(len, labels))
    cells = width - margin - 2
    rows = _braille(points, cells, height - 2) if unicode else _ascii(points, cells, height - 2)
    side, corner, floor = ("┤", "└", "─") if unicode else ("|", "+", "-")
    paint = (lambda row: f"{_CYAN}{row}{_PLAIN}") if colour else str
    body = [f"{label:>{margin}} {side}{paint(row)}".rstrip() for label, row in zip(labels, rows, strict=True)]
    first, last = str(points[0].step), f"step {points[-1].step}"
    return [*body, f"{'':{margin}} {corner}{floor * cells}", f"{'':{margin + 2}}{first}{last:>{cells - len(first)}}"]


def fits(out: TextIO, environment: Mapping[str, str] | None = None) -> dict[str, int | bool]:
    """Return the arguments of `draw` for a stream: its width, whether it takes Unicode, and colours only on a terminal without NO_COLOR."""
    environment = os.environ if environment is None else environment
    terminal = out.isatty()
    columns = shutil.get_terminal_size((80, 24)).columns if terminal else 80
    unicode = (getattr(out, "encoding", None) or "ascii").lower().replace("-", "") in ("utf8", "utf16")
    coloured = terminal and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
    return {"width": min(columns - 1, 100), "height": 12, "unicode": unicode, "colour": coloured}


def _labels(low: float, high: float, rows: int) -> list[str]:
    shown = {0: high, rows // 2: high - (high - low) * (rows // 2) / max(rows - 1, 1), rows - 1: low}
    if low == high:
        shown = {rows // 2: low}
    return [f"{shown[row]:.3f}" if row in shown else "" for row in range(rows)]


def _heights(points: Sequence[Point], columns: int, levels: int) -> list[int]:
    """Return for each column the level of the curve, 0 at the bottom, between the points on the straight line that joins them."""
    low, high = min(point.value for point in points), max(point.value for point in points)
    first, last = points[0].step, points[-1].step
    heights, index = [], 0
    for column in range(columns):
        step = first + (last - first) * column / max(columns - 1, 1)
        while index + 2 < len(points) and points[index + 1].step < step:
            index += 1
        left, right = points[index], points[min(index + 1, len(points) - 1)]
        share = (step - left.step) / (right.step - left.step) if right.step > left.step else 0.0
        value = left.value + (right.value - left.value) * min(max(share, 0.0), 1.0)
        # All values the same: the line goes through the middle, where its label is.
        heights.append(round((value - low) / (high - low) * (levels - 1)) if high > low else (levels - 1) // 2)
    return heights if last > first else heights[:1]


def _braille(points: Sequence[Point], cells: int, rows: int) -> list[str]:
    heights = _heights(points, cells * 2, rows * 4)
    grid = [[0] * cells for _ in range(rows)]
    for column, level in enumerate(heights):
        # Down to its neighbour, so that a steep curve stays one line.
        until = heights[column - 1] if column else level
        for dot in range(min(level, until), max(level, until) + 1):
            down = rows * 4 - 1 - dot
            grid[down // 4][column // 2] |= _DOTS[down % 4][column % 2]
    return ["".join(chr(0x2800 + bits) if bits else " " for bits in row) for row in grid]


def _ascii(points: Sequence[Point], cells: int, rows: int) -> list[str]:
    grid = [[" "] * cells for _ in range(rows)]
    for column, level in enumerate(_heights(points, cells, rows)):
        grid[rows - 1 - level][column] = "*"
    return ["".join(row) for row in grid]
