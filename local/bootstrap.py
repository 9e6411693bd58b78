"""From the machine's own Python to the checkout's virtual environment: the first half minute of the first command.

The build of the tools is by far the longest part, so a child process begins it at once; the rest of the command runs beside it and finds it
finished, or waits for it with its progress.
"""

from __future__ import annotations

import os
import subprocess
import sys

from local import paths, python, system
from local.node import host
from local.progress import Progress
from local.tools import cache
from local.tools.build import die_with_parent
from local.tools.pins import TOOLS


def enter(command: list[str], requirements: str, *, platform: bool, progress: Progress) -> None:
    """Continue in the virtual environment with the packages of `requirements`; returns at once when this process is there already.

    With `platform`, the distribution's packages are installed first and the build of missing tools is begun.
    """
    if platform:
        host.check()
        if not python.inside() and not all(cache.find(tool) for tool in TOOLS):
            _begin_tools()
        system.provide(progress)
    python.provide(requirements, progress)
    if not python.inside():
        interpreter = str(paths.VENV / "bin" / "python")
        sys.stdout.flush()
        os.execv(interpreter, [interpreter, "-m", "local", *command])  # noqa: S606 - same process, so its children stay its own


def _begin_tools() -> None:
    log = paths.HOME / "logs" / "tools.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        subprocess.Popen(
            [sys.executable, "-m", "local", "tools"],
            cwd=paths.PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=die_with_parent,  # this process, which keeps its number when it goes on in the virtual environment
        )
