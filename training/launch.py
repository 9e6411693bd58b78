"""The first process of the training container: checks what needs no torch, starts torchrun, and ends with a code that says why.

    python -m training.launch --config /etc/trainyard/run.json

Exit codes: 0 done, 1 unexpected error, 42 evicted and saved, 43 evicted and not saved, 44 configuration, 45 data,
46 preflight (object store), 47 no usable checkpoint.

A signal before all ranks are ready to stop in good order ends the run at once with 43: waiting for torch to load, only to save what
the last checkpoint holds already, would waste the grace period. Nothing is lost then; no step has been made since that checkpoint.
Later, the signal goes to the workers. Not to torchrun: it would kill them after 30 seconds, however long the grace period is.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from training.config import RunConfig, load
from training.data import fetch, find_dataset, window_count
from training.errors import DATA, DONE, EVICTED_SAVED, EVICTED_UNSAVED, PREFLIGHT, UNEXPECTED, StoreError, TrainerError
from training.events import Events
from training.ledger import Ledger
from training.store import Store
from training.work import Order, Outcome, Work, adopt_orphans, die_with_parent, kill_children

CONFIG_PATH = Path("/etc/trainyard/run.json")
ORDERLY = {DONE, EVICTED_SAVED, EVICTED_UNSAVED}
POLL_SECONDS = 0.1
RESERVE_SECONDS = 5.0  # of the grace period: to tell what happened before the kubelet kills this process
LEDGER_SECONDS = 3  # of that reserve
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # a sum over threads depends on their number
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # what deterministic algorithms need of cuBLAS
    "GLOO_SOCKET_IFNAME": "lo",  # all ranks are in this pod; its name may not resolve
}


class Evicted(BaseException):
    """The signal came while nothing was running that could be saved. As with KeyboardInterrupt, no `except Exception` may swallow it."""


class OutOfTime(BaseException):
    """What was tried took too long."""


class Eviction:
    """SIGTERM or SIGINT: interrupts the checks before training, and is only noted while workers run."""

    def __init__(self) -> None:
        self.received = ""
        self.deferred = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        if not self.deferred:
            raise Evicted


class Launch:
    """One attempt of a run."""

    def __init__(self, work: Work, eviction: Eviction) -> None:
        self._work, self._eviction = work, eviction
        self.events = Events("", 1, sys.stdout)
        self.ledger: Ledger | None = None

    def run(self, config_path: Path) -> Outcome:
        """Check, train, and give the outcome."""
        try:
            config = load(config_path)
            self.events.run = config.run
            attempt = self._begin(config)
            data = self._fetch_data(config)
            self._work.give(Order(config.model_dump(mode="json"), attempt, str(data), time.time()))
            self._eviction.deferred = True
            return self._supervise(config)
        except TrainerError as error:
            return Outcome(error.code, error.message)
        except Evicted:
            return self._evicted()

    def _begin(self, config: RunConfig) -> int:
        """Check the object store by reading and writing the ledger, and begin the attempt."""
        try:
            store = Store(config.bucket)
            store.check()
            ledger = Ledger(self._work.ledger, store, config.run)
            attempt = ledger.fetch()
            self.events = Events(config.run, attempt, sys.stdout, self._work.ledger)
            self.events.emit(
                "start",
                world_size=config.processes,
                image=os.environ.get("TRAINYARD_IMAGE", ""),
                git_sha=os.environ.get("TRAINYARD_GIT_SHA", ""),
                pod=os.environ.get("TRAINYARD_POD", ""),
            )
            ledger.put()
        except StoreError as error:
            raise StoreError(error.message, PREFLIGHT) from None
        self.ledger = ledger
        return attempt

    def _fetch_data(self, config: RunConfig) -> Path:
        """Bring the verified dataset onto this node."""
        try:
            store = Store(config.data_bucket)
            manifest = find_dataset(store, config.data.prefix)
            window_count(manifest, config.train.sequence_length)
            folder = fetch(store, config.data.prefix, manifest)
        except StoreError as error:
            raise StoreError(error.message, DATA) from None
        self.events.emit("data", dataset=manifest.name, shards=len(manifest.shards), tokens=manifest.tokens, sha256=manifest.sha256)
        return folder

    def _supervise(self, config: RunConfig) -> Outcome:
        """Run the workers until they end, or until the signal and the grace period end them."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--max-restarts", "0"]
        command += ["--nproc-per-node", str(config.processes), "-m", "training.worker", "--work", str(self._work.path)]
        torchrun = subprocess.Popen(command, env={**ENVIRONMENT, **os.environ}, start_new_session=True, preexec_fn=die_with_parent)
        while torchrun.poll() is None and not self._eviction.received:
            time.sleep(POLL_SECONDS)
        if not self._eviction.received:
            return self._work.outcome(config.processes)
        if torchrun.poll() is None and not self._stop_workers(torchrun, config):
            os.killpg(torchrun.pid, signal.SIGKILL)
            torchrun.wait()
            kill_children()
            return self._evicted()
        outcome = self._work.outcome(config.processes)
        return self._evicted(outcome.message) if outcome.code == UNEXPECTED else outcome

    def _stop_workers(self, torchrun: subprocess.Popen, config: RunConfig) -> bool:
        """Ask every worker to save and stop; False when they are not ready for that or do not manage it in time."""
        workers = self._work.ready_pids()
        if len(workers) < config.processes:
            return False
        for pid in workers:
            _terminate(pid)
        try:
            torchrun.wait(max(config.grace_seconds - RESERVE_SECONDS, 1.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Store the ledger. During an eviction the store gets little time: a code that comes too late tells nothing."""
        if self.ledger is None:
            return
        signal.signal(signal.SIGALRM, _out_of_time)
        signal.alarm(LEDGER_SECONDS if self._eviction.received else 0)
        try:
            self.ledger.put()
        except StoreError as error:
            print(f"the ledger could not be stored: {error.message}", file=sys.stderr)
        except OutOfTime:
            print(f"the ledger could not be stored within {LEDGER_SECONDS} s: the object store does not answer", file=sys.stderr)
        signal.alarm(0)

    def _evicted(self, message: str = "") -> Outcome:
        """Tell of an eviction that no worker could tell of."""
        step = self.ledger.last_step() if self.ledger else 0
        self.events.emit("evicted", step=step, saved=False, signal=self._eviction.received)
        return Outcome(EVICTED_UNSAVED, message)


def _out_of_time(_number: int, _frame: FrameType | None) -> None:
    raise OutOfTime


def _terminate(pid: int) -> None:
    """Send SIGTERM to a worker; one that has just ended needs none."""
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return


def main() -> int:
    """Launch, and end with the exit code of the outcome."""
    eviction = Eviction()
    adopt_orphans()
    parser = argparse.ArgumentParser(
        prog="python -m training.launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=CONFIG_PATH, help="the run's configuration (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trainyard-") as folder:
        launch = Launch(Work(Path(folder)), eviction)
        outcome = launch.run(arguments.config)
        eviction.deferred = True
        if outcome.code not in ORDERLY:
            launch.events.emit("error", code=outcome.code, message=outcome.message)
        launch.close()
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
