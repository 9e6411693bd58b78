"""Every program of the embedded platform: found on PATH, in the cache, or built from its pinned Go module."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from local import paths
from local.errors import Problem
from local.progress import Progress
from local.tools import build, cache
from local.tools.pins import TOOLS, Tool

ENGINE = ("pulumi", "pulumi-language-python", "pulumi-resource-kubernetes")
"""The tools that a cluster of the user's own needs too."""


def provide(progress: Progress, names: Collection[str] = ()) -> None:
    """Make every tool available, or those of `names`, and link it into `.trainyard/bin`; costs nothing when all are there."""
    wanted = [tool for tool in TOOLS if not names or tool.name in names]
    build.build_missing([tool for tool in wanted if not own(tool)], progress)
    _link([tool for tool in TOOLS if tool in wanted or cache.find(tool)])


def locate(name: str) -> Path:
    """Return the path of a tool or of a file beside it (`kueue/chart`), without building anything.

    Raises `Problem` when it has not been built yet.
    """
    tool_name, _, inside = name.partition("/")
    place = cache.folder(cache.tool(tool_name)) / (inside or tool_name)
    if not place.exists():
        raise Problem(f"{name} is not there yet", where=str(place), fix="make tools")
    return place


def own(tool: Tool) -> Path | None:
    """Return the user's own program of this name when it is on PATH, fits and has its companions; else `None`."""
    found = _outside(tool.name)
    if tool.path_minimum is None or found is None:
        companion_of = next((other for other in TOOLS if tool.name in other.path_companions), None)
        return _outside(tool.name) if companion_of and own(companion_of) else None
    if not all((found.parent / companion).exists() or _outside(companion) for companion in tool.path_companions):
        return None
    answer = subprocess.run([found, "version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"(\d+)\.(\d+)\.\d+", answer)
    fits = match and int(match[1]) == tool.path_minimum[0] and (int(match[1]), int(match[2])) >= tool.path_minimum
    return found if fits else None


def table() -> str:
    """Return what `make tools` prints: tool, version, where from, size, seconds."""
    rows: list[Sequence[str]] = [("tool", "version", "from", "size", "seconds")]
    for tool in TOOLS:
        rows.append((tool.name, tool.version, *_origin(tool)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _origin(tool: Tool) -> tuple[str, str, str]:
    path = own(tool)
    if path:
        return str(path), "", ""
    built = cache.find(tool)
    if not built:
        return "not built", "", ""
    return "cache", f"{built.size / 1e6:.0f} MB", f"{built.seconds:.0f}"


def _outside(name: str) -> Path | None:
    """Look a program up on PATH, passing over our own folder of links."""
    found = shutil.which(name)
    return Path(found) if found and paths.BIN not in Path(found).parents else None


def _link(tools: Sequence[Tool]) -> None:
    programs: dict[str, Path] = {}
    for tool in tools:
        place, path = cache.folder(tool), own(tool)
        if path:
            programs[tool.name] = path
            continue
        if tool.plugin:
            # The engine passes over folders that are links themselves.
            _make_links(paths.PULUMI_PLUGINS / f"{tool.plugin}-v{tool.version}", {tool.name: place / tool.name})
        else:
            programs.update({name: place / name for name in (tool.name, *tool.links)})
    _make_links(paths.BIN, programs)


def _make_links(folder: Path, wanted: dict[str, Path]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stale in set(folder.iterdir()) - {folder / name for name in wanted}:
        if stale.is_symlink():
            stale.unlink()
    for name, target in wanted.items():
        link = folder / name
        if not link.is_symlink() or link.readlink() != target:
            link.unlink(missing_ok=True)
            link.symlink_to(target)
