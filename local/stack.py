"""The Pulumi engine on the `local` stack: its environment, its state below `.trainyard/`, and the facts of the node that it deploys to."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path

import yaml

from local import paths
from local.errors import Problem
from local.images.trainer import Image
from local.node import configs, layout
from local.tools import locate

STACK = "local"
_PASSPHRASE = paths.HOME / "pulumi.passphrase"
_CONFIG = paths.HOME / f"Pulumi.{STACK}.yaml"
_SALT = "encryptionsalt"


def write_facts(image: Image) -> None:
    """Write what the program must know of the node: `trainyard:platform` in the stack file names this file."""
    facts = {
        "kubeconfig": str(layout.KUBECONFIG),
        "objectStore": {
            "endpoint": layout.STORE,
            "cidr": f"{layout.NODE_ADDRESS}/32",
            "port": layout.STORE_PORT,
            "region": layout.STORE_REGION,
        },
        "images": {"trainer": image.reference, "kueue": layout.IMAGES["kueue"], "jobset": layout.IMAGES["jobset"]},
        "gitSha": image.tag,
        "charts": {name: str(locate(f"{name}/chart")) for name in ("kueue", "jobset")},
    }
    paths.PLATFORM.write_text(json.dumps(facts, indent=2) + "\n")


def environment(credentials: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment in which the engine runs: own state and plugins, the tools and the virtual environment first on PATH."""
    bypass = ",".join(filter(None, (os.environ.get("NO_PROXY"), layout.NODE_ADDRESS)))
    ours = {
        "PATH": os.pathsep.join((str(paths.VENV / "bin"), str(paths.BIN), os.environ.get("PATH", ""))),
        "VIRTUAL_ENV": str(paths.VENV),
        "PULUMI_HOME": str(paths.HOME / "pulumi-home"),
        "PULUMI_BACKEND_URL": f"file://{paths.PULUMI_STATE}",
        "PULUMI_CONFIG_PASSPHRASE": _passphrase(),
        "PULUMI_SKIP_UPDATE_CHECK": "true",
        "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
        "NO_PROXY": bypass,
        "no_proxy": bypass,
    }
    if credentials is None:
        credentials = configs.store_credentials() if layout.STORE_CREDENTIALS.exists() else {}
    return {**os.environ, **ours, **credentials}


def pulumi(*arguments: str, quiet: bool = False) -> int:
    """Run the engine on the stack and return its exit code; its output goes to the terminal unless `quiet`."""
    paths.PULUMI_STATE.mkdir(parents=True, exist_ok=True)
    config = _config_file()
    _select(config)
    command = ["pulumi", *arguments, f"--stack={STACK}", f"--config-file={config}", "--non-interactive"]
    output = subprocess.DEVNULL if quiet else None
    return subprocess.run(command, cwd=paths.PROJECT, env=environment(), stdout=output, stdin=subprocess.DEVNULL, check=False).returncode


def up() -> None:
    """Deploy; raises `Problem` when the engine refuses or fails, after it has said why."""
    code = pulumi("up", "--yes", "--skip-preview", "--suppress-outputs", "--color=auto")
    if code:
        raise Problem("the deployment did not succeed: the lines above say why", fix="make status; when it is mended: make up")


def exists() -> bool:
    """Tell whether the stack was ever deployed from this checkout."""
    return (paths.PULUMI_STATE / ".pulumi" / "stacks").exists()


def _select(config: Path) -> None:
    command = ["pulumi", "stack", "select", "--create", STACK, f"--config-file={config}", "--non-interactive"]
    done = subprocess.run(command, cwd=paths.PROJECT, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Problem(f"the Pulumi stack {STACK} cannot be opened: {done.stderr.strip()}", where=str(paths.PULUMI_STATE))


def _config_file() -> Path:
    """Return a copy of the stack file for the engine.

    The engine writes the salt of its encryption into the file it is given; the committed one stays as it is.
    """
    committed = yaml.safe_load((paths.PROJECT / f"Pulumi.{STACK}.yaml").read_text()) or {}
    if _CONFIG.exists():
        salt = (yaml.safe_load(_CONFIG.read_text()) or {}).get(_SALT)
        committed.update({_SALT: salt} if salt else {})
    _CONFIG.write_text(yaml.safe_dump(committed, sort_keys=False))
    return _CONFIG


def _passphrase() -> str:
    """Return the passphrase that encrypts the secrets in the state, made once."""
    if not _PASSPHRASE.exists():
        descriptor = os.open(_PASSPHRASE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as handle:
            handle.write(secrets.token_urlsafe(32))
    return _PASSPHRASE.read_text()
