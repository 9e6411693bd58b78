"""The `local` stack in the real engine, on the real API server."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from local import paths, stack
from local.node import configs
from tests import live


@pytest.fixture(scope="module", autouse=True)
def deployed() -> None:
    live.deploy()


def test_a_second_up_changes_nothing() -> None:
    done = live.engine("up", "--yes", "--skip-preview", "--suppress-outputs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^Resources:\n\s+\d+ unchanged\n", done.stdout, re.M), done.stdout


def test_a_preview_right_after_says_that_everything_is_as_it_should_be() -> None:
    done = live.engine("preview", "--expect-no-changes", "--diff")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_refresh_finds_the_cluster_as_the_state_describes_it() -> None:
    done = live.engine("refresh", "--preview-only", "--expect-no-changes", "--diff")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_credentials_of_the_store_appear_neither_in_the_state_nor_in_what_the_engine_prints() -> None:
    secret = configs.store_credentials()["AWS_SECRET_ACCESS_KEY"]
    exported = live.engine("stack", "export").stdout
    assert json.loads(exported)["deployment"]["resources"]
    shown = live.engine("preview", "--diff", "--json").stdout + live.engine("stack", "output", "--json").stdout
    for text in (exported, shown):
        assert secret not in text
    on_disk = [path for path in paths.PULUMI_STATE.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert not on_disk


def test_the_committed_stack_file_is_not_written_to() -> None:
    before = paths.STACK_FILE.read_bytes()
    assert live.engine("preview").returncode == 0
    assert paths.STACK_FILE.read_bytes() == before


@pytest.mark.parametrize("name", ["dev", "prod"])
def test_the_stacks_that_are_to_come_say_so_in_one_sentence(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy") / "checkout"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(paths.PROJECT), str(copy)], check=True)
    state = tmp_path_factory.mktemp("state")
    environment = {**stack.environment(), "PULUMI_BACKEND_URL": f"file://{state}"}

    def pulumi(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["pulumi", *arguments, "--non-interactive"]
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)

    assert pulumi("stack", "select", "--create", name).returncode == 0
    done = pulumi("preview", f"--stack={name}")
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "eks" in output
    assert "Traceback" not in output
