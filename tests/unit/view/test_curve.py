import io

import pytest

from local.view.curve import draw, fits
from local.view.ledger import Point

FALLING = [Point(step, 6.0 - step / 75) for step in range(0, 301, 5)]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def cells(lines, side):
    """The plotted part of each row, padded."""
    return [row.split(side, 1)[1] for row in lines[:-2]]


@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize(("width", "height"), [(24, 4), (60, 8), (100, 20)])
def test_a_plot_fits_its_width_and_height(unicode, width, height):
    lines = draw(FALLING, width, height, unicode=unicode)
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert lines[-1].endswith("step 300")


def test_a_falling_curve_starts_at_the_top_left_and_ends_at_the_bottom_right():
    rows = cells(draw(FALLING, 60, 10, unicode=False), "|")
    assert rows[0].startswith("*")
    assert rows[-1].endswith("*")
    assert rows[-1].startswith(" ")
    # One star a column: a line, not a cloud.
    width = max(map(len, rows))
    assert [sum(row.ljust(width)[c] == "*" for row in rows) for c in range(width)] == [1] * width


def test_braille_joins_a_jump_to_one_line():
    rows = cells(draw([Point(step, 0.0 if step < 500 else 10.0) for step in range(1000)], 30, 10), "┤")
    assert all(any("⠀" < cell <= "⣿" for cell in row) for row in rows)


def test_the_labels_are_the_highest_and_the_lowest_value():
    lines = draw(FALLING, 60, 10)
    assert lines[0].split()[0] == "6.000"
    assert lines[-3].split()[0] == "2.000"


def test_a_constant_is_a_level_line_beside_its_one_label():
    lines = draw([Point(step, 2.5) for step in range(10)], 40, 9, unicode=False)
    drawn = [row for row in lines[:-2] if "*" in row]
    assert len(drawn) == 1
    assert drawn[0].startswith("2.500 |***")
    assert sum("2.500" in row for row in lines) == 1


def test_one_point_is_one_mark():
    assert sum(row.count("*") for row in draw([Point(5, 3.0)], 40, 9, unicode=False)) == 1


def test_without_a_point_there_is_no_plot():
    assert draw([]) == []


def test_ascii_is_ascii():
    assert all(row.isascii() for row in draw(FALLING, unicode=False))


@pytest.mark.parametrize(
    ("out", "environment", "unicode", "colour"),
    [
        (Terminal(), {}, True, True),
        (Terminal(), {"NO_COLOR": "1"}, True, False),
        (Terminal(), {"TERM": "dumb"}, True, False),
        (io.TextIOWrapper(io.BytesIO(), "utf-8"), {}, True, False),
        (io.TextIOWrapper(io.BytesIO(), "ascii"), {}, False, False),
        (io.TextIOWrapper(io.BytesIO(), "latin-1"), {}, False, False),
    ],
)
def test_what_a_stream_can_show(out, environment, unicode, colour):
    room = fits(out, environment)
    assert (room["unicode"], room["colour"]) == (unicode, colour)
    assert any("\x1b" in row for row in draw(FALLING, **room)) == colour
