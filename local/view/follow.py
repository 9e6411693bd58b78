"""Follow a run to its end: one live line on a terminal, plain lines elsewhere, and the result in a form to keep."""

from __future__ import annotations

import queue
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from local.errors import Problem
from local.paths import PROJECT, REPORTS
from local.progress import clock
from local.view import goodput
from local.view.cluster import Cluster, Obj, RunObjects, has_begun, moment
from local.view.curve import draw, fits
from local.view.ledger import Ledger
from local.view.narrate import Log, Look, changes, failure, live_line, size
from local.view.report import write
from local.view.store import Store
from local.view.timeline import timeline
from local.view.waiting import Stage, decide, exit_code, notable

_EVERY = 1.0
"""Seconds between two looks at the cluster."""
_PATIENCE = 30.0
"""Seconds in which a Job may appear, or the API server be silent, before it is called missing."""
INTERRUPTED = 130


def follow(run: str, kubeconfig: str | Path, store: Store, out: TextIO | None = None, reports: Path = REPORTS) -> int:
    """Follow the run until it ends; return 0 when it completed, the trainer's exit code (or 1) when it failed, 130 after Ctrl-C."""
    screen = Screen(out or sys.stdout)
    try:
        return _Follower(run, Cluster(kubeconfig), store, screen, reports).to_the_end()
    except KeyboardInterrupt:
        screen.say(f"The run {run} goes on without you. Look at it: make status. Follow it again: make logs RUN={run}")
        return INTERRUPTED
    finally:
        screen.live("")


class Screen:
    """Lasting lines, and on a terminal one that changes below them."""

    def __init__(self, out: TextIO) -> None:
        """Write to `out`."""
        self.out, self.terminal = out, out.isatty()

    def say(self, line: str) -> None:
        """Print a lasting line."""
        self.live("")
        encoding = getattr(self.out, "encoding", None) or "utf-8"
        print(line.encode(encoding, errors="replace").decode(encoding), file=self.out, flush=True)

    def live(self, line: str) -> None:
        """Show the changing line, on a terminal only."""
        if self.terminal:
            width = int(fits(self.out)["width"])
            self.out.write(f"\r\x1b[K{line[:width]}")
            self.out.flush()


class _Follower:
    """One following: what was stored before, what the pods say now, and what was told already."""

    def __init__(self, run: str, cluster: Cluster, store: Store, screen: Screen, reports: Path) -> None:
        self._run, self._cluster, self._store, self._screen, self._reports = run, cluster, store, screen, reports
        self._log = Log()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._streams: dict[str, tuple[threading.Thread, bool]] = {}
        """By pod: the thread that reads its log, and whether it began after the end of the pod, so that it reads all of it."""
        self._stored = store.ledger_lines(run)
        self._told: Look | None = None

    def to_the_end(self) -> int:
        """Look, tell, and return when nothing more will happen."""
        objects = self._objects()
        already = self._look(objects)
        if not already.stage.ended:
            # Events of attempts before this following are history, not news.
            self._told = Look(Stage(""), already.ledger)
        while not (look := self._look(objects)).stage.ended:
            self._tell(look)
            self._wait(objects)
            objects = self._objects()
        self._last_lines(objects)
        return self._result(self._look(objects), objects)

    def _objects(self) -> dict[str, RunObjects]:
        """Return the run's objects by role, waiting for them where they are not there yet."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                objects = {one.role: one for one in self._cluster.runs(self._run)}
            except (Problem, ApiException):
                if time.monotonic() > deadline:
                    raise
                objects = {}
            if objects or Ledger.merge(self._stored).state.name == "completed":
                return objects
            if time.monotonic() > deadline:
                raise Problem(f"No run named {self._run} is deployed.", where="Jobs labelled trainyard.dev/run", fix="make up")
            self._screen.live(f"waits for the Job of run {self._run}")
            time.sleep(_EVERY)

    def _look(self, objects: dict[str, RunObjects]) -> Look:
        ledger = Ledger.merge(self._stored, self._log.events)
        stage, decisive = decide(objects, ledger)
        begun = moment(decisive.job["metadata"]["creationTimestamp"]) if decisive else None
        return Look(stage, ledger, max(0.0, time.time() - begun) if begun else 0.0)

    def _tell(self, look: Look) -> None:
        for line in changes(self._told, look, steps=not self._screen.terminal):
            self._screen.say(line)
        self._screen.live(live_line(look))
        self._told = look

    def _wait(self, objects: dict[str, RunObjects]) -> None:
        """Let the logs come in for a while; the first line ends the wait for nothing, the look is due anyway."""
        self._listen(objects)
        until = time.monotonic() + _EVERY
        while (left := until - time.monotonic()) > 0:
            try:
                self._log.add(self._lines.get(timeout=left))
            except queue.Empty:
                return

    def _listen(self, objects: dict[str, RunObjects]) -> None:
        """Have one thread a pod whose container has begun; one that lost its connection is replaced while the pod runs."""
        for pod in (pod for one in objects.values() for pod in one.pods):
            uid, over = pod["metadata"]["uid"], pod["status"].get("phase") in ("Succeeded", "Failed")
            reading, complete = self._streams.get(uid, (None, False))
            if complete or (reading and reading.is_alive()) or not has_begun(pod):
                continue
            thread = threading.Thread(target=self._stream, args=(pod,), daemon=True)
            self._streams[uid] = (thread, over)
            thread.start()

    def _stream(self, pod: Obj) -> None:
        try:
            for line in self._cluster.log(pod, follow=True):
                self._lines.put(line)
        except (ApiException, HTTPError, OSError, Problem):
            return  # The next look finds the pod gone, or reads its log again.

    def _last_lines(self, objects: dict[str, RunObjects]) -> None:
        """Read to the end what ended pods said, and the ledger as it was written last."""
        for _ in range(2):  # A stream that ran when its pod ended may have broken: ended pods are read once more.
            self._listen(objects)
            for thread, _complete in self._streams.values():
                thread.join(timeout=5)
        while not self._lines.empty():
            self._log.add(self._lines.get())
        self._stored = self._store.ledger_lines(self._run)

    def _result(self, look: Look, objects: dict[str, RunObjects]) -> int:
        if self._told:
            self._tell(look)
        decisive = decide(objects, look.ledger)[1]
        path = write(self._run, look.ledger, decisive, timeline(look.ledger, decisive, time.time()), self._reports, look.state)
        if look.stage.name == "completed":
            for line in success(self._run, look.ledger, self._store, fits(self._screen.out)):
                self._screen.say(line)
            code = 0
        else:
            code = exit_code(decisive) if decisive else None
            for line in failure(self._run, look.stage, look.ledger, code, list(self._log.other)):
                self._screen.say(line)
            code = code or 1
            self._warn(objects)
        self._screen.say(f"  report:       {_shown(path)}")
        self._screen.say(f"  next:         make status, make logs RUN={self._run}, make down")
        return code

    def _warn(self, objects: dict[str, RunObjects]) -> None:
        seen = dict.fromkeys(event.get("message", "") for one in objects.values() for event in notable(one.events))
        for message in list(seen)[-3:]:
            self._screen.say(f"  on the way:   {message}")


def success(run: str, ledger: Ledger, store: Store, room: dict[str, int | bool]) -> list[str]:
    """Return the result of a completed run: curve, loss, where the time went, checkpoints."""
    points = ledger.series("loss")
    seconds = sum((attempt.end or attempt.start) - attempt.start for attempt in ledger.attempts)
    lines = ["", "loss, nats per byte", *draw(points, **room), ""] if points else [""]  # type: ignore[arg-type]  # width, height, two flags
    loss = f", final loss {ledger.state.loss:.3f}" if ledger.state.loss is not None else ""
    starts = f" in {len(ledger.attempts)} attempts" if len(ledger.attempts) > 1 else ""
    validation = ledger.last("evaluate")
    beside = f", validation loss {value:.3f}" if validation and (value := validation.number("loss")) is not None else ""
    lines.append(f"The run {run} is complete: {ledger.state.step} steps{loss}{beside}, {clock(seconds)}{starts}.")
    if parts := goodput.account(ledger):
        lines += ["  where the time went:", *(f"  {line}" for line in goodput.lines(parts))]
    good = [checkpoint.step for checkpoint in ledger.checkpoints if checkpoint.good is not None]
    proved = f", loaded back and proved: {', '.join(map(str, good))}" if good else ""
    kept = f"{len(ledger.checkpoints)} written, the last {size(ledger.checkpoints[-1].size)}" if ledger.checkpoints else "none written"
    return [*lines, f"  checkpoints:  {store.checkpoints_uri(run)} ({kept}{proved})"]


def _shown(path: Path) -> str:
    return str(path.relative_to(PROJECT)) if path.is_relative_to(PROJECT) else str(path)
