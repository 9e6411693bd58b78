"""The cache of built tools: one folder a tool and pin, complete or absent.

A tool's key is a hash of everything that decides its binary: the go.mod and go.sum of its module, the sources of its package, its flags.
A build is written beside its place and moved there whole, so a folder that exists is a tool that works.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from local import paths
from local.tools.pins import TOOLS, Tool

MODULES = paths.PROJECT / "tools"
_RECORD = "built.json"
_DECIDES_NOTHING = ("expected_seconds", "path_minimum", "path_companions", "plugin")


@dataclass(frozen=True)
class Built:
    """How a tool came to be in the cache."""

    version: str
    seconds: float
    size: int


def tool(name: str) -> Tool:
    """Return the pinned tool of this name; `KeyError` names a programming mistake."""
    return {pinned.name: pinned for pinned in TOOLS}[name]


def key(pinned: Tool) -> str:
    """Return the twelve hexadecimal digits that stand for everything which decides this tool's binary."""
    module = MODULES / pinned.module
    digest = hashlib.sha256()
    for source in [module / "go.mod", module / "go.sum", *sorted(_sources(module, pinned))]:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    decides = {name: value for name, value in asdict(pinned).items() if name not in _DECIDES_NOTHING}
    digest.update(json.dumps(decides, sort_keys=True).encode())
    return digest.hexdigest()[:12]


def _sources(module: Path, pinned: Tool) -> list[Path]:
    local_package = pinned.package.startswith(".")
    return list((module / pinned.package).glob("*.go")) if local_package else []


def folder(pinned: Tool) -> Path:
    """Return where this tool is, or would be, in the cache."""
    return paths.cache() / "tools" / f"{pinned.name}-{key(pinned)}"


def find(pinned: Tool) -> Built | None:
    """Return how the cached tool was built, `None` when it is not in the cache."""
    try:
        return Built(**json.loads((folder(pinned) / _RECORD).read_text()))
    except FileNotFoundError:
        return None


def install(pinned: Tool, staged: Path, seconds: float) -> None:
    """Move the finished build in `staged` to its place, links and record included; an old build of the same tool is removed."""
    for link in pinned.links:
        (staged / link).symlink_to(pinned.name)
    size = sum(file.stat().st_size for file in staged.rglob("*") if file.is_file() and not file.is_symlink())
    (staged / _RECORD).write_text(json.dumps(asdict(Built(pinned.version, round(seconds, 1), size))))
    place = folder(pinned)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    staged.replace(place)
    for old in place.parent.glob(f"{pinned.name}-????????????"):
        if old != place:
            shutil.rmtree(old, ignore_errors=True)
