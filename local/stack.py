"""The Pulumi engine on the `local` stack: its environment, its state below `.trainyard/`, and the facts of the node that it deploys to."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from infra.plan import plan_of_file
from infra.problems import ConfigError
from infra.settings import PlatformConfig
from local import paths
from local.errors import Problem
from local.images.trainer import Image
from local.node import configs, layout
from local.tools import locate
from local.view import Store

STACK = "local"
_GOES_ON = re.compile(r" (creat|updat|replac|delet|read)ing( original)? \(\d+s\)(?!.*(Waiting for|[Ee]rror))")
_PASSPHRASE = paths.HOME / "pulumi.passphrase"
_CONFIG = paths.HOME / f"Pulumi.{STACK}.yaml"


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


def environment() -> dict[str, str]:
    """Return the environment in which the engine runs: own state and plugins, the tools and the virtual environment first on PATH."""
    bypass = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), layout.NODE_ADDRESS)))
    ours = {
        "PATH": os.pathsep.join((str(paths.VENV / "bin"), str(paths.BIN), os.environ.get("PATH", ""))),
        "VIRTUAL_ENV": str(paths.VENV),
        "PULUMI_HOME": str(paths.PULUMI_HOME),
        "PULUMI_BACKEND_URL": f"file://{paths.PULUMI_STATE}",
        "PULUMI_CONFIG_PASSPHRASE": _passphrase(),
        "PULUMI_SKIP_UPDATE_CHECK": "true",
        "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
        "NO_PROXY": bypass,
        "no_proxy": bypass,
    }
    return {**os.environ, **ours, **_store_credentials()}


def python() -> str:
    """Return the interpreter of the virtual environment."""
    return str(paths.VENV / "bin" / "python")


def pulumi(*arguments: str) -> int:
    """Run the engine on the stack, its output on the terminal, and return its exit code."""
    return subprocess.run(_command(arguments), cwd=paths.PROJECT, env=environment(), stdin=subprocess.DEVNULL, check=False).returncode


def captured(*arguments: str, extra_runs: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run the engine on the stack with run files added to those of its configuration; return what it printed and its exit code."""
    command = _command(arguments, extra_runs)
    return subprocess.run(
        command, cwd=paths.PROJECT, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def _command(arguments: Sequence[str], extra_runs: Sequence[str] = ()) -> list[str]:
    paths.PULUMI_STATE.mkdir(parents=True, exist_ok=True)
    config = _config_file(extra_runs)
    with_config = [] if arguments[0] == "stack" else [f"--config-file={config}"]
    return ["pulumi", *arguments, f"--stack={STACK}", *with_config, "--non-interactive"]


@dataclass(frozen=True)
class Target:
    """Where the stack is deployed, and the names of its runs."""

    kubeconfig: Path
    store: Store
    runs: tuple[str, ...]


def check() -> None:
    """Raise `Problem` with everything that is wrong in the stack file and its run files."""
    _configuration()


def target() -> Target:
    """Return where the stack is deployed; the credentials of its object store are put into the environment, for every AWS client.

    Raises `Problem` when nothing is up, or the stack file is wrong.
    """
    config, runs = _configuration()
    if config.kubeconfig is None or config.object_store is None:
        raise Problem("nothing is up", fix="make up")
    os.environ.update(_store_credentials())
    store = Store(config.object_store.endpoint, config.object_store.region, config.storage.bucket)
    return Target(paths.PROJECT / Path(config.kubeconfig).expanduser(), store, runs)


def _store_credentials() -> dict[str, str]:
    """Return the keys of the embedded store; those of a store of the user's own are in the environment already."""
    return configs.store_credentials() if paths.embedded() and layout.STORE_CREDENTIALS.exists() else {}


def _configuration() -> tuple[PlatformConfig, tuple[str, ...]]:
    try:
        planned = plan_of_file(paths.STACK_FILE, paths.PROJECT)
        return planned.config, tuple(run.name for run in planned.runs)
    except ConfigError as error:
        raise Problem(str(error)) from None


def up() -> None:
    """Deploy, telling each change once; raises `Problem` when the engine refuses or fails, after it has said why."""
    command = _command(("up", "--yes", "--skip-preview", "--suppress-outputs"))
    engine = subprocess.Popen(
        command, cwd=paths.PROJECT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert engine.stdout
    for line in told(engine.stdout):
        print(line, flush=True)
    if engine.wait():
        raise Problem("the deployment did not succeed: the lines above say why", fix="make status; when it is mended: make up")


def told(lines: Iterable[str]) -> Iterator[str]:
    """Return what is worth reading of the engine's output: without its heartbeat, its repetitions and what goes on unchanged."""
    before = ""
    for line in map(str.rstrip, lines):
        if not (line.startswith("@ ") or _GOES_ON.search(line) or line == before):
            yield line
            before = line


def exists() -> bool:
    """Tell whether the stack was ever deployed from this checkout."""
    return (paths.PULUMI_STATE / ".pulumi" / "stacks").exists()


def _config_file(extra_runs: Sequence[str]) -> Path:
    """Return a copy of the stack file for the engine, with run files added and the salt of the stack's encryption.

    The engine keeps that salt in the stack file, where it would change a committed file on every machine.
    """
    content = yaml.safe_load(paths.STACK_FILE.read_text()) or {}
    content.get("config", {}).setdefault("trainyard:runs", []).extend(extra_runs)
    content["encryptionsalt"] = _salt()
    _CONFIG.write_text(yaml.safe_dump(content, sort_keys=False))
    return _CONFIG


def _salt() -> str:
    """Return the salt of the stack, which is made with the stack: in a folder where the engine may write a stack file."""
    scratch = paths.HOME / "pulumi-init"
    made = scratch / f"Pulumi.{STACK}.yaml"
    if not exists() or not made.exists():
        scratch.mkdir(parents=True, exist_ok=True)
        (scratch / "Pulumi.yaml").write_text("name: trainyard\nruntime: python\n")
        command = ["pulumi", "stack", "init", STACK, "--non-interactive"]
        done = subprocess.run(command, cwd=scratch, env=environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise Problem(
                f"the Pulumi stack {STACK} cannot be made: {done.stderr.strip()}", where=str(paths.PULUMI_STATE), fix="make clean"
            )
    return yaml.safe_load(made.read_text())["encryptionsalt"]


def _passphrase() -> str:
    """Return the passphrase that encrypts the secrets in the state, made once."""
    if not _PASSPHRASE.exists():
        descriptor = os.open(_PASSPHRASE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as handle:
            handle.write(secrets.token_urlsafe(32))
    return _PASSPHRASE.read_text()
