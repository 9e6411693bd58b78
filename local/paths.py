"""Where things are: the project, what is generated in it, and the cache that outlives it."""

from __future__ import annotations

import os
import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
"""The checkout."""

HOME = PROJECT / ".trainyard"
"""Everything generated for this checkout; `make clean` removes it."""

BIN = HOME / "bin"
"""Links to every tool, first on the PATH of whatever is started from here."""

VENV = HOME / "venv"
PLATFORM = HOME / "platform.json"
REPORTS = HOME / "reports"
PULUMI_HOME = HOME / "pulumi-home"
PULUMI_PLUGINS = PULUMI_HOME / "plugins"
PULUMI_STATE = HOME / "pulumi"


STACK_FILE = PROJECT / "Pulumi.local.yaml"


def embedded() -> bool:
    """Tell whether the local stack deploys to the embedded node, not to a cluster of the user's own.

    Read as text: this is asked before anything that reads YAML is installed.
    """
    return not re.search(r"""^\s*["']?trainyard:kubeconfig["']?\s*:""", STACK_FILE.read_text(), re.MULTILINE)


def cache() -> Path:
    """Return the folder of what is slow to make and the same for every checkout: `$TRAINYARD_CACHE` or the user's cache directory."""
    chosen = os.environ.get("TRAINYARD_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "trainyard"
