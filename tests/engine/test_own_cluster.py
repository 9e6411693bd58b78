"""A cluster of the user's own: a stack file that names a kubeconfig needs no embedded platform. The embedded one stands in for it here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from local import paths, stack

SKIPPED = ("trainyard:platform",)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone whose stack file names a kubeconfig, an object store, images and charts, and no platform file."""
    copy = tmp_path / "checkout"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(paths.PROJECT), str(copy)], check=True)
    (copy / ".trainyard").mkdir()
    (copy / ".trainyard" / "venv").symlink_to(paths.VENV)
    facts = json.loads(paths.PLATFORM.read_text())
    file = copy / "Pulumi.local.yaml"
    document = yaml.safe_load(file.read_text())
    own = {
        "trainyard:kubeconfig": facts["kubeconfig"],
        "trainyard:objectStore": facts["objectStore"],
        "trainyard:images": facts["images"],
        "trainyard:charts": {name: {"chart": folder} for name, folder in facts["charts"].items()},
    }
    document["config"] = {key: value for key, value in document["config"].items() if key not in SKIPPED} | own
    file.write_text(yaml.safe_dump(document))
    return copy


def test_the_node_is_skipped_and_the_target_is_the_users_cluster(checkout: Path) -> None:
    script = "from local import paths, stack\ntarget = stack.target()\nprint(paths.embedded(), target.kubeconfig, *target.runs)"
    done = subprocess.run([stack.python(), "-c", script], cwd=checkout, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", json.loads(paths.PLATFORM.read_text())["kubeconfig"], "smoke"]


def test_the_engine_plans_the_whole_platform_on_it(checkout: Path, tmp_path: Path) -> None:
    environment = {**stack.environment(), "PULUMI_BACKEND_URL": f"file://{tmp_path}"}

    def pulumi(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["pulumi", *arguments, "--non-interactive"]
        return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)

    made = pulumi("stack", "init", "local")
    assert made.returncode == 0, made.stderr
    done = pulumi("preview", "--stack=local")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trainyard:runs:TrainingRun smoke create" in done.stdout
    assert "helm.sh/v3:Release kueue create" in done.stdout
