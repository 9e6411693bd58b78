"""Runs the trainer as the pod does, as real processes, and looks at what it tells and stores."""

import copy
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from .gateway import Gateway

BUCKET = "lab"
DATASET = "datasets/prose"
REPOSITORY = Path(__file__).resolve().parents[2]
RUN_SECONDS = 150
STEPS, EVERY = 24, 6

CONFIG: dict[str, Any] = {
    "run": "straight",
    "bucket": BUCKET,
    "model": "byte-1m",
    "data": {"name": "prose", "prefix": DATASET, "source": "", "pattern": "*.txt"},
    "train": {
        "steps": STEPS,
        "batch_size": 4,
        "sequence_length": 64,
        "learning_rate": 0.003,
        "warmup_steps": 4,
        "weight_decay": 0.1,
        "grad_clip": 1.0,
        "seed": 1234,
        "log_every": 1,
    },
    "checkpoint": {"every_steps": EVERY, "keep": 3, "prove": False},  # proving loads torch once more
    "processes": 2,
    "grace_seconds": 60,
}


def step_of(key: str) -> int:
    """Give the step of a checkpoint's object."""
    return int(key.split("/")[3].removeprefix("step-"))


class Told:
    """The events of one attempt, and how it ended."""

    def __init__(self, code: int, events: list[dict[str, Any]], errors: str) -> None:
        self.code, self.events, self.errors = code, events, errors

    def named(self, *names: str) -> list[dict[str, Any]]:
        """Pick events by name."""
        return [event for event in self.events if event["event"] in names]

    def one(self, name: str) -> dict[str, Any]:
        """Give the only event of a name."""
        (event,) = self.named(name)
        return event

    @property
    def losses(self) -> dict[int, float]:
        """Map each step to its loss."""
        return {event["step"]: event["loss"] for event in self.named("step")}


class Attempt:
    """A started trainer. Left alone it is killed, with everything it started, when the test ends."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        self._events: list[dict[str, Any]] = []
        self._stray: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                try:
                    self._events.append(json.loads(line))
                except ValueError:
                    self._stray.append(line)
                self._changed.notify_all()

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until an event of some kind has been told."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(wanted, self._events)), RUN_SECONDS), f"never told:\n{self._log.read_text()}"

    def told(self, *names: str) -> list[dict[str, Any]]:
        """Pick events by name among those told so far."""
        with self._changed:
            return [event for event in self._events if event["event"] in names]

    def processes(self) -> dict[int, list[bytes]]:
        """Map the living processes of this attempt to their command lines."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"LAB_ATTEMPT={self._log}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it ended while we looked
                continue
        return found

    def workers(self) -> list[int]:
        """List the processes that train."""
        return sorted(
            pid for pid, words in self.processes().items() if b"training.worker" in words and b"torch.distributed.run" not in words
        )

    def signal(self, number: int) -> Self:
        """Send a signal to the first process of the container."""
        self.process.send_signal(number)
        return self

    def end(self) -> Told:
        """Wait for the end and give all that was told."""
        code = self.process.wait(RUN_SECONDS)
        self._reader.join(RUN_SECONDS)
        assert not self._stray, f"something else than events was printed on stdout: {self._stray}"
        return Told(code, self._events, self._log.read_text())

    def abandon(self) -> None:
        """Make sure that nothing is left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Lab:
    """An object store with a prepared dataset, and trainers started against it."""

    def __init__(self, gateway: Gateway, folder: Path) -> None:
        self.gateway, self.client = gateway, gateway.client
        self.folder = folder
        self._attempts: list[Attempt] = []
        (folder / "tmp").mkdir(parents=True)

    def config(self, run: str, **changes: Any) -> dict[str, Any]:
        """Describe a run; `train={"steps": 3}` changes only that key of the section."""
        config = {**copy.deepcopy(CONFIG), "run": run}
        for key, value in changes.items():
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
        return config

    def start(self, config: dict[str, Any], module: str = "training.launch", **environment: str) -> Attempt:
        """Start a trainer with this configuration."""
        number = len(self._attempts)
        path, log = self.folder / f"run-{number}.json", self.folder / f"attempt-{number}.log"
        path.write_text(json.dumps(config))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        variables = {**inherited, **self.gateway.environment, "TMPDIR": str(self.folder / "tmp"), "LAB_ATTEMPT": str(log), **environment}
        attempt = Attempt([sys.executable, "-m", module, "--config", str(path)], variables, log)
        self._attempts.append(attempt)
        return attempt

    def run(self, config: dict[str, Any], module: str = "training.launch", **environment: str) -> Told:
        """Run a trainer to its end."""
        return self.start(config, module, **environment).end()

    def keys(self, prefix: str) -> list[str]:
        """List the objects below a prefix."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return sorted(entry.get("Key", "") for page in pages for entry in page.get("Contents", []))

    def checkpoints(self, run: str) -> list[int]:
        """List the steps of the committed checkpoints of a run."""
        return [step_of(key) for key in self.keys(f"runs/{run}/checkpoints/") if key.endswith("/COMMITTED")]

    def ledger(self, run: str) -> list[dict[str, Any]]:
        """Read what the store knows of a run."""
        return [json.loads(line) for line in self.get(f"runs/{run}/ledger.jsonl").splitlines()]

    def get(self, key: str) -> bytes:
        """Read an object."""
        return self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def put(self, key: str, content: bytes) -> None:
        """Write an object."""
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def branch(self, source: str, run: str, steps: list[int]) -> None:
        """Copy checkpoints of a run to another name, which can then be resumed by itself."""
        for key in self.keys(f"runs/{source}/checkpoints/"):
            if step_of(key) in steps:
                self.put(key.replace(f"runs/{source}/", f"runs/{run}/", 1), self.get(key))

    def flip_bit(self, key: str) -> None:
        """Damage one bit in the middle of an object."""
        content = bytearray(self.get(key))
        content[len(content) // 2] ^= 1
        self.put(key, bytes(content))

    def close(self) -> None:
        """End whatever still runs."""
        for attempt in self._attempts:
            attempt.abandon()
