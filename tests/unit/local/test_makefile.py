"""The Makefile is the command line: what it lists is what there is."""

from __future__ import annotations

import re
import subprocess

import pytest

from local import commands, paths

MAKEFILE = (paths.PROJECT / "Makefile").read_text()
PROMISED = ("up", "down", "clean", "test", "check", "fmt", "preview", "logs", "status", "tools", "help")


def test_help_lists_every_command_with_what_it_does() -> None:
    listed = subprocess.run(["make", "help"], cwd=paths.PROJECT, capture_output=True, text=True, check=True).stdout
    for target in PROMISED:
        assert re.search(rf"^  make {target} +\S+", listed, re.M), target


def test_every_command_that_the_makefile_calls_exists() -> None:
    called = set(re.findall(r"-m local (\w+)", MAKEFILE))
    assert called <= set(commands.COMMANDS)
    assert set(commands.COMMANDS) - called == {"platform"}


def test_an_unknown_command_is_refused_with_the_ones_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main(["upp"])
    assert ended.value.code == 2
    assert "'up'" in capsys.readouterr().err


def test_the_suite_runs_every_tier_there_is() -> None:
    tiers = {path.name for path in (paths.PROJECT / "tests").iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert tiers <= set(commands.TIERS)
