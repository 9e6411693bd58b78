"""Processes of the node are found again, told from strangers with the same number, and ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from local.node import layout, processes


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(layout, "PIDS", tmp_path / "run")


def start(script: str, until: str) -> None:
    processes.start("demo", [sys.executable, "-uc", script], {})
    deadline = time.monotonic() + 10
    while until not in processes.tail("demo"):
        assert time.monotonic() < deadline, "the process never wrote what was expected"


def test_a_process_is_found_again_and_ended() -> None:
    start("import time; print('up'); time.sleep(600)", "up")
    number = processes.pid("demo")
    assert number
    assert processes.alive("demo")
    processes.stop("demo", grace=5)
    assert not processes.alive("demo")
    assert not Path(f"/proc/{number}/cmdline").exists() or not Path(f"/proc/{number}/cmdline").read_bytes()


def test_one_that_ignores_sigterm_is_killed_after_its_grace() -> None:
    start("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)", "up")
    begun = time.monotonic()
    processes.stop("demo", grace=0.3)
    assert not processes.alive("demo")
    assert time.monotonic() - begun >= 0.3


def test_a_killed_process_counts_as_dead_even_before_it_is_reaped() -> None:
    start("import time; print('up'); time.sleep(600)", "up")
    number = processes.pid("demo")
    assert number
    os.kill(number, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while processes.alive("demo"):
        assert time.monotonic() < deadline


def test_a_stranger_with_the_recorded_number_is_left_alone() -> None:
    start("import time; print('up'); time.sleep(600)", "up")
    number = processes.pid("demo")
    record = layout.PIDS / "demo.pid"
    assert number
    record.write_text(f"{number} 1")
    assert processes.pid("demo") is None
    processes.stop("demo", grace=0.1)
    assert Path(f"/proc/{number}").exists()
    processes.end([number], grace=5)


def test_a_process_is_found_by_a_word_of_its_command_line() -> None:
    start("import time; print('up'); time.sleep(600)  # needle", "up")
    number = processes.pid("demo")
    assert number
    assert number in processes.matching("import time; print('up'); time.sleep(600)  # needle")
    processes.stop("demo", grace=5)
