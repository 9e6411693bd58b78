"""Building tools from their pinned Go modules: resumable, safe for two at once, with progress.

Compiled packages are kept in a build cache of our own, so an interrupted build goes on where it stopped; once every tool is there, the
build cache and the module downloads (some 11 GB) are removed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from local import locks, paths
from local.errors import Problem
from local.progress import Progress, clock
from local.tools import cache, golang
from local.tools.pins import Extra, Tool

TASK = "tools"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)
_FREE_BYTES = 14 * 10**9
"""Downloads, build cache and binaries together, measured 11 GB."""


def build_missing(tools: Sequence[Tool], progress: Progress) -> None:
    """Build each of `tools` that is not in the cache, in their order.

    Raises `Problem` when a build fails, the module proxy cannot be reached or the disk is nearly full.
    """
    if all(cache.find(tool) for tool in tools):
        return
    root = paths.cache()
    with progress.task(TASK), locks.exclusive(root / "lock", lambda other: progress.detail(TASK, other)) as tell:
        missing = [tool for tool in tools if not cache.find(tool)]
        if missing:
            _check_space(root)
            progress.detail(TASK, "the Go toolchain")
            go = golang.toolchain()
            for position, tool in enumerate(missing):
                doing = _doing(tool, missing[position + 1 :])
                progress.detail(TASK, doing)
                tell(doing)
                progress.say(f"  built {tool.name} {tool.version} in {clock(_build(go, tool))}")
            _drop_build_cache(go)
        progress.detail(TASK, f"{len(missing)} built" if missing else "built by another process")


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends, however that ends: a build nobody waits for is not wanted."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def environment() -> dict[str, str]:
    """Return the environment of the Go commands: own caches, no download of toolchains, more memory for a third less time."""
    root = paths.cache() / "go"
    ours = {
        "CGO_ENABLED": "0",
        "GOCACHE": str(root / "build"),
        "GOFLAGS": "-buildvcs=false",
        "GOGC": "400",
        "GOMODCACHE": str(root / "mod"),
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
    }
    return {**os.environ, **ours}


def _doing(tool: Tool, left: Sequence[Tool]) -> str:
    remaining = tool.expected_seconds + sum(other.expected_seconds for other in left)
    then = f", then {', '.join(other.name for other in left)}" if left else ""
    return f"building {tool.name}{then}: some {clock(remaining)} to go on two cores"


def _build(go: Path, tool: Tool) -> float:
    """Build one tool into the cache and return the seconds it took."""
    begun = time.monotonic()
    place = cache.folder(tool)
    staged = place.with_name(f".{place.name}.{os.getpid()}")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    flags = [f"-gcflags={flag}" for flag in ("all=-dwarf=false", *tool.gcflags)]
    command = [go, "build", "-trimpath", "-ldflags", " ".join(("-s -w", *tool.ldflags)), *flags, "-o", staged / tool.name, tool.package]
    done = subprocess.run(
        command, cwd=cache.MODULES / tool.module, env=environment(), capture_output=True, text=True, check=False, preexec_fn=die_with_parent
    )
    if done.returncode:
        shutil.rmtree(staged, ignore_errors=True)
        raise _failure(tool, done.stderr)
    for extra in tool.extras:
        _copy_extra(go, cache.MODULES / (extra.pinned_by or tool.module), extra, staged / extra.name)
    seconds = time.monotonic() - begun
    cache.install(tool, staged, seconds)
    return seconds


def _copy_extra(go: Path, pins: Path, extra: Extra, destination: Path) -> None:
    download = [go, "mod", "download", "-json", extra.module]
    answer = subprocess.run(download, cwd=pins, env=environment(), capture_output=True, text=True, check=True).stdout
    original = Path(json.loads(answer)["Dir"]) / extra.source
    if original.is_dir():
        shutil.copytree(original, destination, copy_function=shutil.copyfile)
    else:
        shutil.copyfile(original, destination)
        destination.chmod(0o755 if extra.executable else 0o644)
    for copied in [destination, *destination.rglob("*")]:  # the module cache is read-only, folders included
        if copied.is_dir():
            copied.chmod(0o755)


def _failure(tool: Tool, output: str) -> Problem:
    log = paths.HOME / "logs" / f"build-{tool.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(output)
    unreachable = ("dial tcp", "no such host", "i/o timeout", "connection refused", "TLS handshake", "Forbidden", "502", "503")
    fix = (
        "check that the Go module proxy can be reached (`go env GOPROXY`), then run the command again: it goes on where it stopped"
        if any(sign in output for sign in unreachable)
        else "read the log; then run the command again: it goes on where it stopped"
    )
    return Problem(f"{tool.name} {tool.version} could not be built: {golang.last_line(output)}", where=str(log), fix=fix)


def _check_space(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < _FREE_BYTES:
        raise Problem(
            f"building the tools needs {_FREE_BYTES / 1e9:.0f} GB of free disk, {free / 1e9:.1f} GB are free",
            where=str(root),
            fix="free some space, or set TRAINYARD_CACHE to a folder on another disk",
        )


def _drop_build_cache(go: Path) -> None:
    subprocess.run([go, "clean", "-modcache"], env=environment(), check=False, capture_output=True)
    shutil.rmtree(paths.cache() / "go" / "build", ignore_errors=True)
