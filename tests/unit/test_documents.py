"""What the documents point at exists: the tests that docs/status.md calls proof, the links, and the files of the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from local import paths

DOCUMENTS = [paths.PROJECT / "README.md", paths.PROJECT / "CHANGELOG.md", *sorted((paths.PROJECT / "docs").rglob("*.md"))]
LINES, MODULE_LINES = 400, 60


def named_tests() -> list[tuple[str, str]]:
    """Return file and test of every proof that the status table names; `::test` alone belongs to the file named before it."""
    found, file = [], ""
    rows = [line for line in (paths.PROJECT / "docs" / "status.md").read_text().splitlines() if line.startswith("|")]
    for name, test in re.findall(r"`((?:[\w/]+\.py)?)::([\w*]+)`", "\n".join(rows)):
        file = name or file
        found.append((file, test))
    return found


def test_every_proof_in_the_status_table_is_a_test_that_exists() -> None:
    assert len(named_tests()) > 20
    for file, test in named_tests():
        source = (paths.PROJECT / "tests" / file).read_text()
        assert test == "*" or f"def {test}(" in source, f"{file}::{test}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(paths.PROJECT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_no_module_is_longer_than_fits_in_the_head() -> None:
    sources = [path for folder in ("infra", "training", "local", "tests", "benchmarks") for path in (paths.PROJECT / folder).rglob("*.py")]
    too_long = {str(path): count for path in sources if (count := len(path.read_text().splitlines())) > LINES}
    assert not too_long
    assert len((paths.PROJECT / "__main__.py").read_text().splitlines()) <= MODULE_LINES
