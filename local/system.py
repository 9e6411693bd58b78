"""What comes from the distribution: checked, and installed with apt where there is apt and root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from local import python
from local.errors import Problem
from local.progress import Progress
from local.tools.golang import last_line
from local.tools.pins import CNI_FOLDERS, CNI_PACKAGE, CNI_PLUGINS, IMAGE_PROGRAMS, SYSTEM_PROGRAMS

TASK = "system packages"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
"""mmdebstrap checks Debian's signatures with it; other distributions than Debian have it as a package."""


def provide(progress: Progress) -> None:
    """Install the distribution's packages that are missing; raises `Problem` naming them where that is not possible."""
    wanted = missing()
    if not wanted:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Problem(
            f"these programs of the distribution are missing; their Debian packages: {', '.join(wanted)}",
            fix=f"apt-get install --no-install-recommends {' '.join(wanted)}   (or your distribution's packages of the same programs)",
        )
    with progress.task(TASK, " ".join(wanted)):
        for arguments in (["update", "-qq"], ["install", "--yes", "-qq", "--no-install-recommends", *wanted]):
            _apt(*arguments)


def missing() -> list[str]:
    """Return the Debian packages of what is not there."""
    packages = {package for program, package in {**SYSTEM_PROGRAMS, **IMAGE_PROGRAMS}.items() if not _has(program)}
    if not any(all((Path(folder) / plugin).exists() for plugin in CNI_PLUGINS) for folder in CNI_FOLDERS):
        packages.add(CNI_PACKAGE)
    if "mmdebstrap" in packages and not _KEYRING.exists():
        packages.add("debian-archive-keyring")
    if python.missing_venv_module():
        packages.add(f"python{sys.version_info.major}.{sys.version_info.minor}-venv")
    return sorted(packages)


def _has(program: str) -> bool:
    """Look a program up, also where a user's PATH does not lead."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


def _apt(*arguments: str) -> None:
    command = ["apt-get", "-o", "DPkg::Lock::Timeout=300", *arguments]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise Problem(
            f"`{' '.join(command)}` failed: {last_line(done.stderr or done.stdout)}",
            fix="check that the package mirror can be reached, then run the command again",
        )
