"""Child processes that outlive the command that started them: a pid file each, a log each, found again and ended by the next command."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from local import paths
from local.node import layout


def start(name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start `command` in a session of its own, its output appended to the component's log."""
    layout.LOGS.mkdir(parents=True, exist_ok=True)
    layout.PIDS.mkdir(parents=True, exist_ok=True)
    path = f"{paths.BIN}{os.pathsep}{os.environ.get('PATH', '')}"
    with log(name).open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd="/",
            env={"PATH": path, "HOME": str(layout.ROOT), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    process.returncode = 0  # disowned: `subprocess` would warn of a child that nobody waits for
    _pid_file(name).write_text(f"{process.pid} {_started(process.pid)}")


def alive(name: str) -> bool:
    """Tell whether the component's process runs: the very one that was started, not another with its number."""
    return pid(name) is not None


def pid(name: str) -> int | None:
    """Return the process id of a running component, `None` when it does not run."""
    return _running(_pid_file(name))


def any_alive(folder: Path) -> bool:
    """Tell whether any process runs of which `folder` holds the pid file."""
    return any(_running(record) for record in folder.glob("*.pid"))


def _running(record: Path) -> int | None:
    try:
        number, started = record.read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    return int(number) if _started(int(number)) == started else None


def begun(name: str) -> float:
    """Return when a component was started, in whole seconds since the epoch (as heartbeats are); now if it does not run."""
    try:
        return float(int(_pid_file(name).stat().st_mtime)) if alive(name) else time.time()
    except FileNotFoundError:
        return time.time()


def stop(name: str, *, grace: float = 10.0) -> None:
    """End a component: SIGTERM, then SIGKILL after `grace` seconds."""
    number = pid(name)
    if number is not None:
        end([number], grace=grace)
    _pid_file(name).unlink(missing_ok=True)


def end(numbers: Iterable[int], *, grace: float) -> None:
    """End processes: SIGTERM to all, SIGKILL to those that are left after `grace` seconds; returns when all are gone."""
    identities = {number: _started(number) for number in numbers}
    for sent, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
        for number, started in identities.items():
            if started and _started(number) == started:
                _send(number, sent)
        deadline = time.monotonic() + patience
        while any(started and _started(number) == started for number, started in identities.items()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)


def matching(argument: str) -> list[int]:
    """Return the ids of processes that have `argument` on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it ended meanwhile
            continue
        if argument in arguments:
            found.append(int(entry.name))
    return found


def log(name: str) -> Path:
    """Return the component's log file."""
    return layout.LOGS / f"{name}.log"


def tail(name: str, lines: int = 5) -> str:
    """Return the last lines of a component's log."""
    try:
        return "\n".join(log(name).read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def _pid_file(name: str) -> Path:
    return layout.PIDS / f"{name}.pid"


def _started(number: int) -> str:
    """Return when a process was started (clock ticks after boot), empty when it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, threads, started = fields[0], int(fields[17]), fields[19]
    # The first thread of a killed process may be a zombie while others still hold its sockets.
    return "" if state in "ZX" and threads <= 1 else started


def _send(number: int, what: signal.Signals) -> None:
    try:
        os.kill(number, what)
    except ProcessLookupError:
        return
