"""Progress on standard output: one live line a running task on a terminal, plain lines elsewhere, never silence over some seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_PLAIN_EVERY = 30.0
"""Seconds between two plain lines of a task that still runs, where there is no terminal."""


def clock(seconds: float) -> str:
    """Return a duration for people: `4.2s`, `3m05s`, `1h02m`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


class Progress:
    """Tasks that run side by side, each with a name, a detail that changes, and the time since it began."""

    def __init__(self, out: TextIO | None = None) -> None:
        """Write to `out`, standard output by default."""
        self._out = out or sys.stdout
        self._live = self._out.isatty()
        self._lock = threading.Lock()
        self._tasks: dict[str, tuple[float, str]] = {}
        self._drawn = 0
        self._last_plain = time.monotonic()
        self._stop = threading.Event()
        self.seconds: dict[str, float] = {}
        """How long each ended task took, by name."""

    def say(self, line: str) -> None:
        """Print one lasting line."""
        with self._lock:
            self._erase()
            print(line, file=self._out, flush=True)

    def detail(self, name: str, text: str) -> None:
        """Change what is said beside a running task."""
        with self._lock:
            if name in self._tasks:
                self._tasks[name] = (self._tasks[name][0], text)

    @contextmanager
    def task(self, name: str, detail: str = "", *, quiet_under: float = 0.0) -> Iterator[None]:
        """Show `name` as running inside the block, and its time after; one that took less than `quiet_under` seconds leaves no line."""
        begun = time.monotonic()
        with self._lock:
            self._tasks[name] = (begun, detail)
        try:
            yield
        except BaseException:
            self._end(name)
            raise
        took = time.monotonic() - begun
        self.seconds[name] = took
        last = self._end(name)
        if took >= quiet_under:
            self.say(f"  {name:<28} {clock(took):>7}  {last}".rstrip())

    def _end(self, name: str) -> str:
        with self._lock:
            self._erase()
            return self._tasks.pop(name, (0.0, ""))[1]

    @contextmanager
    def running(self) -> Iterator[Progress]:
        """Redraw the live lines from a thread while the block runs."""
        thread = threading.Thread(target=self._loop, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()
            with self._lock:
                self._erase()

    def _loop(self) -> None:
        while not self._stop.wait(0.5 if self._live else 1.0):
            with self._lock:
                if self._live:
                    self._erase()
                    self._draw()
                elif time.monotonic() - self._last_plain >= _PLAIN_EVERY and self._tasks:
                    self._last_plain = time.monotonic()
                    running = ", ".join(
                        f"{name} {detail} ({clock(time.monotonic() - begun)})".replace("  ", " ")
                        for name, (begun, detail) in self._tasks.items()
                    )
                    print(f"  ... {running}", file=self._out, flush=True)

    def _draw(self) -> None:
        now = time.monotonic()
        for name, (begun, detail) in self._tasks.items():
            print(f"  {name:<28} {clock(now - begun):>7}  {detail}"[:140], file=self._out)
        self._drawn = len(self._tasks)
        self._out.flush()

    def _erase(self) -> None:
        if self._drawn:
            self._out.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0
