"""Evictions: how a worker learns of one, what it can still do in the time that is left, and where EC2 announces one beforehand."""

import json
import math
import signal
import threading
import time
import urllib.error
import urllib.request
from datetime import datetime
from http.client import HTTPException
from types import FrameType
from typing import Literal

from training.work import Work

NONE, ADVISED, EVICTED = range(3)
ELSEWHERE = "another node"  # the source of a notice that this node has not got
LEVELS = {signal.SIGUSR1: ADVISED, signal.SIGTERM: EVICTED}
MARGIN = 1.25  # a save may take this much longer than the slowest of the last ones
TOKEN_SECONDS = 60  # each poll asks for its own
ANSWER_SECONDS = 2.0
NOTICE_SECONDS = 120.0  # how long before the interruption EC2 gives notice


class EvictionNotice:
    """What this rank knows of an eviction. Ranks learn of it at different moments, those of other nodes perhaps never: ask together.

    With level() all ranks agree that something is to be done (maximum), with seconds_left() on what there is time for (minimum).
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._level, self._heard = NONE, math.inf
        for number in LEVELS:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._level = max(self._level, LEVELS[signal.Signals(number)])
        self._heard = min(self._heard, time.monotonic())

    def level(self) -> int:
        """Say how bad it is: 0 nothing, 1 advised (save now and go on), 2 evicted."""
        return self._level

    def source(self) -> str:
        """Name where the newest notice came from."""
        notice = self._work.notice()
        return notice.source if notice else signal.Signals.SIGTERM.name if self._level else ELSEWHERE

    def seconds_left(self) -> float:
        """Give the time this process may go on living; infinite without a deadline."""
        notice = self._work.notice()
        return notice.deadline - time.monotonic() if notice and notice.deadline is not None else math.inf

    def seconds_since(self) -> float:
        """Give the time since the notice came to this node; 0 without one."""
        notice = self._work.notice()
        return max(time.monotonic() - (notice.noticed if notice else self._heard), 0.0)


def decide(
    seconds_left: float,
    running: bool,
    step_seconds: float,
    staging_seconds: float | None,
    upload_seconds: float | None,
    unsaved_steps: int,
    running_seconds: float = 0.0,
) -> Literal["finish", "save", "leave"]:
    """Choose what to do with the time until the deadline.

    `unsaved_steps` counts the steps since the newest save was begun, `running` says that its upload goes on and `running_seconds` for how
    long; the other times are those of past saves, None before the first. A save can begin only when the step at hand is done.

    save    make a new checkpoint, after the one that is running. With nothing to judge by, try
    finish  only wait for the one that is running
    leave   go now, with what is durable
    """
    if seconds_left <= 0 or not (running or unsaved_steps):
        return "leave"
    if staging_seconds is None or upload_seconds is None:
        return "save" if unsaved_steps else "finish"
    rest = max(upload_seconds - running_seconds, 0.0) if running else 0.0
    if unsaved_steps and (step_seconds + rest + staging_seconds + upload_seconds) * MARGIN <= seconds_left:
        return "save"
    return "finish" if running and rest * MARGIN <= seconds_left else "leave"


class MetadataService:
    """The instance metadata service of EC2, version 2: asks it again and again in a thread of its own, and never fails.

    `interrupted` is when the machine goes (monotonic clock), `advised` whether EC2 recommends to leave it, `problem` why no answer came.
    """

    def __init__(self, address: str, poll_seconds: float) -> None:
        self.interrupted: float | None = None
        self.advised = False
        self.problem = ""
        self._address, self._poll_seconds = address.rstrip("/"), poll_seconds
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the service answers this machine only
        threading.Thread(target=self._watch, name="metadata-service", daemon=True).start()

    def _watch(self) -> None:
        while True:
            try:
                self._ask()
            except (OSError, HTTPException, ValueError) as error:
                self.problem = f"the instance metadata service {self._address} does not answer ({error})"
            time.sleep(self._poll_seconds)

    def _ask(self) -> None:
        """Ask for both kinds of news."""
        token = self._fetch("api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}, "PUT")
        header = {"X-aws-ec2-metadata-token": token or ""}
        notice = self._fetch("meta-data/spot/instance-action", header)
        if notice is not None and self.interrupted is None:
            self.interrupted = time.monotonic() + notice_seconds(notice, time.time())
        self.advised = self.advised or self._fetch("meta-data/events/recommendations/rebalance", header) is not None

    def _fetch(self, path: str, headers: dict[str, str], method: str = "GET") -> str | None:
        """Give the answer, or None when there is no such news."""
        request = urllib.request.Request(f"{self._address}/latest/{path}", method=method, headers=headers)  # noqa: S310 - as configured
        try:
            with self._opener.open(request, timeout=ANSWER_SECONDS) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            raise


def notice_seconds(notice: str, now: float) -> float:
    """Give the seconds until the interruption that a spot notice announces; one that cannot be read is a notice all the same."""
    try:
        moment = datetime.fromisoformat(json.loads(notice)["time"]).timestamp()
    except (ValueError, KeyError, TypeError):
        return NOTICE_SECONDS
    return min(max(moment - now, 0.0), NOTICE_SECONDS)
