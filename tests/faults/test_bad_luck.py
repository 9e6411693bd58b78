"""Bad luck of the machine and of the user: each ends with one message that says what to do, and nothing half-done that cannot be healed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from local import paths
from local.errors import Problem
from local.images import trainer
from local.node import host, layout, lifecycle
from local.progress import Progress
from local.tools import build, cache
from tests.conftest import Until

TRY = """
from local import stack
from local.errors import Problem
try:
    {}
except Problem as problem:
    raise SystemExit(str(problem))
"""


def local(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as the Makefile does, and return what it printed."""
    command = [sys.executable, "-m", "local", *arguments]
    return subprocess.run(command, cwd=paths.PROJECT, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def clear(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Assert that a command failed with a message for people that holds these words."""
    told = done.stdout + done.stderr
    assert done.returncode != 0, told
    assert "Traceback" not in told
    for word in words:
        assert word in told


@pytest.fixture
def stopped() -> Iterator[None]:
    """The node is down inside the test."""
    lifecycle.stop()
    yield
    lifecycle.stop()


def test_an_old_python_is_named_with_the_one_that_is_needed() -> None:
    script = "import sys; sys.version_info = (3, 9, 2); import runpy; runpy.run_module('local', run_name='__main__', alter_sys=True)"
    done = subprocess.run([sys.executable, "-c", script, "up"], cwd=paths.PROJECT, capture_output=True, text=True, check=False)
    clear(done, "needs Python 3.11", "make PYTHON=")


def test_without_root_the_node_says_so_and_offers_the_way_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import os\nfrom local.node import host\nos.seteuid(65534)\nhost.check()"
    done = subprocess.run([sys.executable, "-c", script], cwd=paths.PROJECT, capture_output=True, text=True, check=False)
    assert "needs root" in done.stderr
    assert "docs/own-cluster.md" in done.stderr


def test_a_network_namespace_of_somebody_else_is_left_alone(stopped: None) -> None:
    subprocess.run(["ip", "netns", "add", layout.NAMESPACE], check=True)
    try:
        with pytest.raises(Problem, match="in use by something that is not trainyard"):
            host.prepare()
        assert layout.NETNS.exists()
    finally:
        subprocess.run(["ip", "netns", "delete", layout.NAMESPACE], check=True)


@pytest.fixture
def other_checkout(stopped: None, tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """The folder of another checkout's node that has the machine, with one process of it that runs."""
    root = tmp_path / "other" / ".trainyard" / "node"
    (root / "run").mkdir(parents=True)
    process = subprocess.Popen(["sleep", "600"])
    started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    (root / "run" / "etcd.pid").write_text(f"{process.pid} {started}")
    layout.RUNTIME.mkdir(parents=True)
    (layout.RUNTIME / "owner").write_text(str(root))
    yield root, process
    process.kill()
    process.wait()


def test_the_running_node_of_another_checkout_is_named_and_left_alone(other_checkout: tuple[Path, subprocess.Popen[bytes]]) -> None:
    root, process = other_checkout
    with pytest.raises(Problem, match=f"make down in {root.parent.parent}"):
        host.prepare()
    assert host.owner() == str(root)
    assert process.poll() is None
    (layout.RUNTIME / "owner").unlink()


def test_what_is_left_of_a_node_that_was_killed_is_cleared_away(other_checkout: tuple[Path, subprocess.Popen[bytes]]) -> None:
    root, process = other_checkout
    process.kill()
    process.wait()
    subprocess.run(["ip", "netns", "add", layout.NAMESPACE], check=True)
    lifecycle.start(Progress())
    assert host.owner() == str(layout.ROOT) != str(root)


def test_an_address_range_in_use_is_named(stopped: None) -> None:
    subprocess.run(["ip", "link", "add", "taken0", "type", "veth", "peer", "name", "taken1"], check=True)
    try:
        subprocess.run(["ip", "address", "add", "198.18.0.9/24", "dev", "taken0"], check=True)
        for link in ("taken0", "taken1"):
            subprocess.run(["ip", "link", "set", link, "up"], check=True)
        with pytest.raises(Problem, match=r"route in 198\.18\.0\.0/16.*taken0"):
            host.prepare()
    finally:
        subprocess.run(["ip", "link", "delete", "taken0"], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of fifty megabytes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_nearly_full_is_named_before_anything_is_built(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", str(small_disk))
    with pytest.raises(Problem, match=r"needs 14 GB of free disk, 0\.1 GB are free"):
        build.build_missing([cache.tool("pause")], Progress())
    with pytest.raises(Problem, match=r"needs 16 GB of free disk, 0\.1 GB are free"):
        trainer.check_space()
    assert not list(small_disk.glob("tools/*"))


def test_a_module_proxy_that_cannot_be_reached_is_named_and_the_next_build_goes_on(tmp_path: Path) -> None:
    done = local("tools", TRAINYARD_CACHE=str(tmp_path), GOPROXY="https://127.0.0.1:9", GOFLAGS="")
    clear(done, "could not be built", "Go module proxy", "goes on where it stopped")
    assert not [folder for folder in (tmp_path / "tools").iterdir() if not folder.name.startswith(".")]


def test_a_package_index_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path\nfrom local import paths, python\nfrom local.progress import Progress\n"
        f"paths.HOME = Path({str(tmp_path)!r}); paths.VENV = paths.HOME / 'venv'; python._STAMP = paths.VENV / 'synced.json'\n"
        "from local.errors import Problem\n"
        "try:\n    python.provide('requirements.txt', Progress())\nexcept Problem as problem:\n    raise SystemExit(str(problem))"
    )
    environment = {**os.environ, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}
    environment.pop("PIP_FIND_LINKS", None)
    done = subprocess.run([sys.executable, "-c", script], cwd=paths.PROJECT, env=environment, capture_output=True, text=True, check=False)
    clear(done, "Python packages could not be installed", "package index")


def test_ctrl_c_while_the_node_starts_is_healed_by_the_next_start(stopped: None, until: Until) -> None:
    # What a shell starts in the background ignores Ctrl-C, and hands that down.
    script = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script += "from local.node import lifecycle\nfrom local.progress import Progress\nlifecycle.start(Progress())"
    starting = subprocess.Popen([sys.executable, "-c", script], cwd=paths.PROJECT, stderr=subprocess.DEVNULL)
    until("the first component", lambda: lifecycle.states()["etcd"], 30)
    starting.send_signal(signal.SIGINT)
    assert starting.wait(timeout=60) != 0
    lifecycle.start(Progress())
    assert all(lifecycle.states().values())


def test_ctrl_c_ends_with_one_line(stopped: None) -> None:
    script = "from local import commands\ndef interrupted(_): raise KeyboardInterrupt\ncommands.COMMANDS['down'] = (interrupted, '')\n"
    script += "raise SystemExit(commands.main(['down']))"
    done = subprocess.run([sys.executable, "-c", script], cwd=paths.PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr.strip() == "interrupted; run the command again to go on"


def test_every_mistake_of_a_stack_file_and_of_a_run_file_is_reported_at_once(tmp_path: Path) -> None:
    copy = tmp_path / "checkout"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(paths.PROJECT), str(copy)], check=True)
    stack = copy / "Pulumi.local.yaml"
    stack.write_text(stack.read_text().replace("trainyard:provider: existing", "trainyard:provider: exsting\n  trainyard:colour: blue"))
    script = TRY.format("stack.check()")
    done = subprocess.run([sys.executable, "-c", script], cwd=copy, capture_output=True, text=True, check=False)
    clear(done, "2 problems", "Pulumi.local.yaml", "trainyard:provider", "trainyard:colour", "existing")
    stack.write_text((paths.PROJECT / "Pulumi.local.yaml").read_text())
    run = copy / "runs" / "smoke.yaml"
    run.write_text(run.read_text().replace("byte-2m", "byte-9b"))
    done = subprocess.run([sys.executable, "-c", script], cwd=copy, capture_output=True, text=True, check=False)
    clear(done, "runs/smoke.yaml", "model", "byte-2m")


def test_facts_of_a_platform_that_was_removed_lead_to_make_up(tmp_path: Path) -> None:
    script = TRY.format("stack.target()")
    copy = tmp_path / "checkout"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(paths.PROJECT), str(copy)], check=True)
    done = subprocess.run([sys.executable, "-c", script], cwd=copy, capture_output=True, text=True, check=False)
    clear(done, "make up")
    assert json.loads(paths.PLATFORM.read_text())["kubeconfig"] == str(layout.KUBECONFIG)
