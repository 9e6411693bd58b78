"""The node under bad luck: components killed, started twice, stopped; the machine before and after."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from local import paths
from local.node import components, host, layout, lifecycle, probe, processes
from local.progress import Progress
from tests import live
from tests.conftest import Until

NAMES = [component.name for component in components.ALL]


def heal() -> list[str]:
    """Do what `make up` does to the node, and return what it started."""
    return lifecycle.start(Progress())


@pytest.fixture(autouse=True)
def running() -> None:
    heal()


def test_starting_a_node_that_runs_starts_nothing() -> None:
    before = lifecycle.states()
    assert heal() == []
    assert lifecycle.states() == before


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_component_is_started_again_and_no_other_is_touched(name: str) -> None:
    before = lifecycle.states()
    number = before[name]
    assert number
    bucket_before = live.ledger("smoke").events
    os.kill(number, signal.SIGKILL)
    processes.end([number], grace=0)
    healed = heal()
    assert name in healed
    untouched = set(NAMES) - set(healed)
    assert {other: lifecycle.states()[other] for other in untouched} == {other: before[other] for other in untouched}
    assert live.ledger("smoke").events == bucket_before
    assert probe.get("clusterqueue", "research"), "what etcd held is still there"


def footprint() -> dict[str, object]:
    """Return what a node could leave behind on a machine."""

    def lines(*command: str) -> list[str]:
        return sorted(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())

    mounts = sorted(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    programs = sorted(filter(None, map(_ours, Path("/proc").glob("[0-9]*"))))
    groups = sorted(str(path) for path in layout.CGROUPS.rglob(f"{layout.NAMESPACE}*"))
    return {
        "mounts": mounts,
        "network namespaces": lines("ip", "netns", "list"),
        "links": [line.split(":")[1].strip() for line in lines("ip", "-o", "link")],
        "routes": lines("ip", "route"),
        "iptables": [line for line in lines("iptables-save") if not line.startswith(("#", ":"))],
        "cgroups": groups,
        "processes": programs,
        "inotify": Path("/proc/sys/fs/inotify/max_user_instances").read_text(),
    }


def _ours(entry: Path) -> str:
    """Return the program of a process that the node's folders stand on the command line of."""
    try:
        arguments = (entry / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
    return arguments.split("\0")[0] if any(str(folder) in arguments for folder in (layout.ROOT, layout.RUNTIME)) else ""


def test_a_stopped_node_leaves_the_machine_as_it_was_and_starts_again_with_its_data(until: Until) -> None:
    lifecycle.stop()
    assert lifecycle.ended()
    before = footprint()
    assert layout.NAMESPACE not in repr(before).replace(str(paths.PROJECT), "")
    assert not before["processes"]
    lifecycle.start(Progress())
    during = footprint()
    for kind in ("mounts", "network namespaces", "links", "cgroups", "processes"):
        assert during[kind] != before[kind]
    assert probe.get("clusterqueue", "research")
    lifecycle.stop()
    assert footprint() == before
    assert host.owner() is None


def test_stopping_what_does_not_run_is_no_error() -> None:
    lifecycle.stop()
    lifecycle.stop()
    assert lifecycle.ended()
