"""The first process of the training container: checks what needs no torch, starts torchrun, and ends with a code that says why.

The codes are those of training.errors. On several nodes each has a launcher. The one of node 0 claims the attempt, keeps the ledger and
looks after the checkpoints.

A signal before all ranks are ready to stop in good order ends the run at once with 43: waiting for torch to load, only to save what
the last checkpoint holds already, would waste the grace period. Nothing is lost then; no step has been made since that checkpoint.
Later, the signal goes to the workers. Not to torchrun: it would kill them after 30 seconds, however long the grace period is.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from training.catalog import Catalog
from training.config import RunConfig, load
from training.dataset import check_fits, find_dataset
from training.errors import DATA, DONE, EVICTED_SAVED, EVICTED_UNSAVED, PREFLIGHT, UNEXPECTED, ConfigurationError, StoreError, TrainerError
from training.events import Events
from training.eviction import MetadataService
from training.ledger import Ledger
from training.models import MODELS
from training.store import Store, place_of
from training.work import Notice, Order, Outcome, Work, adopt_orphans, combine, die_with_parent, kill_children, write_whole

CONFIG_PATH = Path("/etc/trainyard/run.json")
ORDERLY = {DONE, EVICTED_SAVED, EVICTED_UNSAVED}
POLL_SECONDS = 0.1
RESERVE_SECONDS = 5.0  # of the grace period: to tell what happened before the kubelet kills this process
LEDGER_SECONDS = 3.0  # of that reserve
KEEPER_SECONDS = 120.0  # for looking after the last checkpoint when training is done
KEEPER_NICENESS = 19
SPOT_NOTICE, REBALANCE_ADVICE = "spot-notice", "rebalance-advice"  # sources of notices, beside the names of signals
COORDINATOR = re.compile(r"([\w.-]+|\[[0-9a-fA-F:]+\])(?::(\d{1,5}))?")
COORDINATOR_PORT = "29400"
TOLD = {"image": "TRAINYARD_IMAGE", "git_sha": "TRAINYARD_GIT_SHA", "pod": "TRAINYARD_POD"}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # a sum over threads depends on their number
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # what deterministic algorithms need of cuBLAS
}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}  # all ranks are on this machine, whose name may not resolve


class Evicted(BaseException):
    """The signal came while nothing was running that could be saved. As with KeyboardInterrupt, no `except Exception` may swallow it."""


class Eviction:
    """SIGTERM or SIGINT: interrupts the checks before training, and is only noted while workers run."""

    def __init__(self) -> None:
        self.deferred, self.grace_seconds = False, 0.0
        self.notices: list[Notice] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.announce(signal.Signals(number).name, self.grace_seconds)
        if not self.deferred:
            raise Evicted

    def announce(self, source: str, seconds: float) -> None:
        """Note that this process will be killed after so many seconds."""
        now = time.monotonic()
        self.notices.append(Notice(source, now, now + max(seconds - RESERVE_SECONDS, 1.0)))


class Node(NamedTuple):
    """This machine among those of the run: its number, and how its torchrun meets the others."""

    rank: int
    rendezvous: tuple[str, ...]
    environment: Mapping[str, str]


def node_of(nodes: int, variables: Mapping[str, str]) -> Node:
    """Find this machine's place by its environment variables; a ConfigurationError says what to set."""
    if nodes == 1:
        return Node(0, ("--standalone", "--local-addr", "127.0.0.1"), LOOPBACK)
    rank = variables.get("TRAINYARD_NODE_RANK") or variables.get("JOB_COMPLETION_INDEX") or ""
    coordinator = variables.get("TRAINYARD_COORDINATOR", "")
    match = COORDINATOR.fullmatch(coordinator)
    if not rank.isdecimal() or int(rank) >= nodes or match is None:
        raise ConfigurationError(
            f"the run has {nodes} nodes: TRAINYARD_NODE_RANK is {rank!r} and must be the number of this one, 0 to {nodes - 1} (a Job with "
            f"completionMode Indexed sets JOB_COMPLETION_INDEX instead); TRAINYARD_COORDINATOR is {coordinator!r} and must be the name or "
            f"address of node 0, with its port unless that is {COORDINATOR_PORT}, for example smoke-0.smoke:{COORDINATOR_PORT}"
        )
    host, port = match[1].strip("[]"), match[2] or COORDINATOR_PORT
    rendezvous = ("--nnodes", str(nodes), "--node-rank", rank, "--master-addr", host, "--master-port", port)
    return Node(int(rank), rendezvous, LOOPBACK if host.startswith("127.") or host in {"localhost", "::1"} else {})


class Launch:
    """One attempt of a run, as far as this node has to do with it."""

    def __init__(self, work: Work, eviction: Eviction) -> None:
        self._work, self._eviction = work, eviction
        self._launched = time.time()
        self._first: tuple[Catalog, Ledger] | None = None
        self._keeper: subprocess.Popen | None = None
        self._done_once: set[object] = set()
        self.events = Events("", 1, sys.stdout)

    def run(self, config_path: Path) -> Outcome:
        """Check, train, and give the outcome."""
        try:
            config = load(config_path)
            self.events.run, self._eviction.grace_seconds = config.run, config.grace_seconds
            node = node_of(config.nodes, os.environ)
            order = self._begin(config, node)
            self._find_data(config)
            self._work.give(replace(order, spent={"start": time.time() - order.launched}))
            self._eviction.deferred = True
            return self._supervise(config, config_path, node)
        except TrainerError as error:
            return Outcome(error.code, error.message)
        except Evicted:
            return self._evicted("leave")

    def _begin(self, config: RunConfig, node: Node) -> Order:
        """Check the object store by using it, and begin the attempt; the first node claims its number and continues the ledger."""
        attempt, reached, journal = 0, 0, None
        try:
            place = place_of(config)
            place.check()
            if node.rank == 0:
                catalog, ledger = Catalog(place, config.run), Ledger(self._work.ledger, place, config.run)
                attempt, journal = catalog.claim(), ledger.path
                ledger.fetch()
                reached = ledger.reached()
                self._first = catalog, ledger
            where = {"node": node.rank} if config.nodes > 1 else {}
            self.events = Events(config.run, attempt, sys.stdout, journal, where)
            told = {name: os.environ.get(variable, "") for name, variable in TOLD.items()}
            self.events.emit("start", world_size=config.processes, **told, reached=reached)
            if self._first is not None:
                self._first[1].put()
        except StoreError as error:
            raise StoreError(error.message, PREFLIGHT) from None
        return Order(config.model_dump(mode="json"), attempt, self._launched, {}, reached)

    def _find_data(self, config: RunConfig) -> None:
        """Check that the dataset is there and suits the run."""
        try:
            manifest = find_dataset(Store(config.data_bucket), config.data.prefix)
        except StoreError as error:
            raise StoreError(error.message, DATA) from None
        check_fits(manifest, MODELS[config.model], config)
        self.events.emit("data", dataset=manifest.name, shards=len(manifest.shards), tokens=manifest.tokens, sha256=manifest.sha256)

    def _supervise(self, config: RunConfig, config_path: Path, node: Node) -> Outcome:
        """Run the workers until they end, or must be ended, and let the keeper finish."""
        count, folder = config.processes // config.nodes, str(self._work.path)
        words = [*node.rendezvous, "--max-restarts", "0", "--nproc-per-node", str(count), "-m", "training.worker", "--work", folder]
        torchrun = _start(["torch.distributed.run", *words], node)
        if node.rank == 0:
            self._keeper = _start(["training.keeper", "--config", str(config_path), "--work", folder], node)
            os.setpriority(os.PRIO_PROCESS, self._keeper.pid, KEEPER_NICENESS)
        watched = config.eviction.metadata_service
        service = MetadataService(watched, config.eviction.poll_seconds) if watched else None
        ended_because = ""
        while torchrun.poll() is None and not ended_because and not self._work.hopeless():
            time.sleep(POLL_SECONDS)
            self._watch(service, count)
            ended_because = self._pass_on(count)
        if torchrun.poll() is None:
            os.killpg(torchrun.pid, signal.SIGKILL)
            torchrun.wait()
            kill_children()
        outcome = combine(self._work.reports(), range(node.rank * count, (node.rank + 1) * count))
        if outcome.code == DONE:
            self._finish(config.train.steps)
        kill_children()
        return self._evicted(ended_because or "crash") if outcome.code == UNEXPECTED and self._eviction.notices else outcome

    def _watch(self, service: MetadataService | None, workers: int) -> None:
        """Take up news of the keeper, without which training goes on, and of the metadata service: each once."""
        if self._keeper is not None and self._keeper.poll() and not self._eviction.notices and self._once("keeper"):
            self.events.emit("degraded", what="keeper", reason=f"it ended with exit code {self._keeper.returncode}; see stderr")
        if service is None:
            return
        if service.problem and self._once("problem"):
            self.events.emit("degraded", what="eviction notices", reason=service.problem)
        if service.interrupted is not None and self._once("interrupted"):
            self._eviction.announce(SPOT_NOTICE, service.interrupted - time.monotonic())
        if service.advised and len(self._work.ready_pids()) == workers and self._once("advised"):
            self._tell_workers(Notice(REBALANCE_ADVICE, time.monotonic()), signal.SIGUSR1)

    def _pass_on(self, workers: int) -> str:
        """Tell the workers of an eviction, and say why they must be ended if they must: not ready to save, or overdue."""
        if not (notices := self._eviction.notices):
            return ""
        deadline = min(notice.deadline or 0.0 for notice in notices)
        if self._once(deadline):
            if self._keeper is not None:
                self._keeper.terminate()
            if len(self._work.ready_pids()) < workers:
                return "leave"
            self._tell_workers(replace(notices[0], deadline=deadline), signal.SIGTERM)
        return "overdue" if time.monotonic() >= deadline else ""

    def _tell_workers(self, notice: Notice, number: int) -> None:
        """Signal the workers; one that has just ended needs no signal."""
        self._work.notify(notice)
        for pid in self._work.ready_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _finish(self, step: int) -> None:
        """Let the keeper look after the last checkpoint, unless the pod is wanted back."""
        write_whole(self._work.finished, str(step))
        end = time.monotonic() + KEEPER_SECONDS
        while self._keeper is not None and self._keeper.poll() is None and not self._eviction.notices and time.monotonic() < end:
            time.sleep(POLL_SECONDS)

    def _once(self, what: object) -> bool:
        first = what not in self._done_once
        self._done_once.add(what)
        return first

    def close(self) -> None:
        """Store the ledger. During an eviction the store gets little time: a code that comes too late tells nothing."""
        storing = threading.Thread(target=self._store_ledger, daemon=True)
        storing.start()
        storing.join(LEDGER_SECONDS if self._eviction.notices else None)
        if storing.is_alive():
            print(f"the ledger could not be stored within {LEDGER_SECONDS} s: the object store does not answer", file=sys.stderr)

    def _store_ledger(self) -> None:
        if self._first is None:
            return
        catalog, ledger = self._first
        try:
            if catalog.newest_attempt() <= self.events.attempt:  # a later one has continued the ledger
                ledger.put()
        except StoreError as error:
            print(f"the ledger could not be stored: {error.message}", file=sys.stderr)

    def _evicted(self, decision: str) -> Outcome:
        """Tell of an eviction that no worker could tell of."""
        self._eviction.deferred = True
        notice = self._eviction.notices[0]
        step, seconds = self._first[1].last_step() if self._first else 0, round(time.monotonic() - notice.noticed, 3)
        self.events.emit("evicted", step=step, saved=False, signal=notice.source, seconds=seconds, decision=decision)
        return Outcome(EVICTED_UNSAVED)


def _start(module: list[str], node: Node) -> subprocess.Popen:
    """Start a Python module in a session of its own. It ends with this process."""
    environment = {**ENVIRONMENT, **node.environment, **os.environ}
    return subprocess.Popen([sys.executable, "-m", *module], env=environment, start_new_session=True, preexec_fn=die_with_parent)


def main() -> int:
    """Launch, and end with the exit code of the outcome."""
    eviction = Eviction()
    adopt_orphans()
    parser = argparse.ArgumentParser(prog="python -m training.launch", description=(__doc__ or "").partition("\n")[0])
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
