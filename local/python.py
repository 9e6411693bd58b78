"""The virtual environment of this checkout, in sync with the compiled requirement files."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

from local import locks, paths
from local.errors import Problem
from local.progress import Progress
from local.tools.golang import last_line

BASE = "requirements.txt"
DEVELOPMENT = "requirements-dev.txt"
TASK = "Python packages"
_BOOTSTRAP = "requirements-bootstrap.txt"
_STAMP = paths.VENV / "synced.json"


def provide(wanted: str, progress: Progress) -> None:
    """Install the packages of the requirement file `wanted`; the development file contains the base file.

    Raises `Problem` when the package index cannot be reached.
    """
    if _synced(wanted):
        return
    with progress.task(TASK, f"from {wanted}"), locks.exclusive(paths.HOME / "venv.lock", lambda other: progress.detail(TASK, other)):
        if _synced(wanted):
            return
        _create()
        _run([str(_python()), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "-r", _BOOTSTRAP])
        sync = [str(_python().with_name("uv")), "pip", "install", "--quiet", "--python", str(_python()), "--require-hashes", "-r", wanted]
        _run(sync)
        known = _stamp() if _STAMP.exists() else {}
        _STAMP.write_text(json.dumps({**known, wanted: _hash(wanted)}))


def inside() -> bool:
    """Tell whether this process runs in the checkout's virtual environment."""
    return Path(sys.prefix).resolve() == paths.VENV.resolve()


def missing_venv_module() -> bool:
    """Tell whether this Python cannot make virtual environments (Debian packages that part apart)."""
    return importlib.util.find_spec("ensurepip") is None


def _synced(wanted: str) -> bool:
    files = (wanted,) if wanted == DEVELOPMENT else (wanted, DEVELOPMENT)
    return _STAMP.exists() and any(_stamp().get(name) == _hash(name) for name in files)


def _stamp() -> dict[str, str]:
    return json.loads(_STAMP.read_text())


def _hash(name: str) -> str:
    return hashlib.sha256((paths.PROJECT / name).read_bytes()).hexdigest()


def _python() -> Path:
    return paths.VENV / "bin" / "python"


def _create() -> None:
    if _python().exists() and subprocess.run([_python(), "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
        return
    shutil.rmtree(paths.VENV, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(paths.VENV)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=paths.PROJECT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Problem(
            f"the Python packages could not be installed: {last_line(done.stderr)}",
            where=" ".join(command[-2:]),
            fix="check that the Python package index can be reached, then run the command again",
        )
