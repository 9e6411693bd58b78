"""The page of all keys is written from the models: it is current, and complete."""

from __future__ import annotations

from pathlib import Path

from infra.reference import reference

PROJECT = Path(__file__).parents[3]


def test_the_committed_page_is_current() -> None:
    page = (PROJECT / "docs" / "reference" / "configuration.md").read_text()
    assert page == reference(), "run: .trainyard/venv/bin/python -m infra.reference > docs/reference/configuration.md"


def test_every_key_has_a_type_a_meaning_and_an_example() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    for row in rows:
        key, kind, default, meaning, example = (cell.strip() for cell in row.strip("|").split(" | "))
        assert key
        assert kind
        assert default
        assert meaning, row
        assert example != "none", row
