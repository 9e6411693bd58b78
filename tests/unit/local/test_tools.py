"""The table of tools, the cache and the lock: what decides whether a tool is built again, and that two builders do not meet."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from local import locks, paths, tools
from local.errors import Problem
from local.tools import cache
from local.tools.pins import TOOLS, Tool

MODULE_OF = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kubernetes": "k8s.io/kubernetes",
    "kueue": "sigs.k8s.io/kueue",
    "jobset": "sigs.k8s.io/jobset",
    "kwok": "sigs.k8s.io/kwok",
    "coredns": "github.com/coredns/coredns",
    "network-policy": "github.com/cloudnativelabs/kube-router/v2",
    "versitygw": "github.com/versity/versitygw",
    "pulumi": "github.com/pulumi/pulumi/pkg/v3",
    "pulumi-language-python": "github.com/pulumi/pulumi/sdk/v3",
}


@pytest.mark.parametrize("name", MODULE_OF)
def test_the_version_shown_is_the_version_that_go_mod_pins(name: str) -> None:
    tool = cache.tool(name)
    pinned = re.search(rf"^\s*(?:require )?{re.escape(MODULE_OF[name])} v(\S+)", (cache.MODULES / tool.module / "go.mod").read_text(), re.M)
    assert pinned
    assert tool.version.split()[-1] == pinned[1]


def test_every_go_module_of_the_tree_is_used_and_has_its_hashes() -> None:
    modules = {path.parent.name for path in cache.MODULES.glob("*/go.mod")}
    assert modules == {tool.module for tool in TOOLS}
    assert all((cache.MODULES / module / "go.sum").stat().st_size for module in modules)


@pytest.fixture
def one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    monkeypatch.setattr(cache, "MODULES", tmp_path / "tools")
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "cache"))
    module = tmp_path / "tools" / "demo"
    (module / "main").mkdir(parents=True)
    for name, text in {"go.mod": "module demo\n", "go.sum": "", "main/main.go": "package main\n"}.items():
        (module / name).write_text(text)
    return Tool("demo", "1.0", "demo", "./main")


@pytest.mark.parametrize("changed", ["go.mod", "go.sum", "main/main.go"])
def test_a_change_of_pins_or_sources_makes_another_key(one_module: Tool, changed: str) -> None:
    before = cache.key(one_module)
    with (cache.MODULES / "demo" / changed).open("a") as handle:
        handle.write("// changed\n")
    assert cache.key(one_module) != before


def test_an_estimate_of_build_time_does_not_make_another_key(one_module: Tool) -> None:
    assert cache.key(one_module) == cache.key(Tool("demo", "1.0", "demo", "./main", expected_seconds=99))


def test_a_tool_is_installed_whole_with_its_links_and_the_old_build_is_removed(one_module: Tool, tmp_path: Path) -> None:
    linked = Tool("demo", "1.0", "demo", "./main", links=("alias",))
    old = cache.folder(linked).with_name("demo-0123456789ab")
    old.mkdir(parents=True)
    staged = tmp_path / "staged"
    staged.mkdir()
    (staged / "demo").write_bytes(b"binary")
    assert cache.find(linked) is None
    cache.install(linked, staged, 1.26)
    assert cache.find(linked) == cache.Built("1.0", 1.3, 6)
    assert (cache.folder(linked) / "alias").read_bytes() == b"binary"
    assert not old.exists()


def test_a_tool_that_is_not_there_names_the_command_that_makes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path))
    with pytest.raises(Problem, match="make tools"):
        tools.locate("etcd")


def test_who_waits_for_the_lock_reads_what_the_holder_does_and_gets_it_when_the_holder_is_killed(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom local import locks\n"
        "with locks.exclusive(Path(sys.argv[1]), print) as tell:\n"
        "    tell('building etcd')\n    print('held', flush=True)\n    time.sleep(600)"
    )
    command = [sys.executable, "-c", script, str(lock)]
    holder = subprocess.Popen(command, cwd=paths.PROJECT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout
    assert holder.stdout.readline() == "held\n"
    seen: list[str] = []

    def waiting(other: str) -> None:
        seen.append(other)
        holder.kill()
        holder.wait()

    with locks.exclusive(lock, waiting):
        pass
    holder.stdout.close()
    assert seen[0] == f"process {holder.pid}: building etcd"


def test_a_users_own_pulumi_is_taken_only_when_it_is_new_enough_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    pulumi = tmp_path / "pulumi"

    def install(version: str) -> None:
        pulumi.write_text(f"#!/bin/sh\necho v{version}\n")
        pulumi.chmod(0o755)

    pinned = cache.tool("pulumi")
    install("3.300.1")
    assert tools.own(pinned) is None, "without the language host beside it"
    (tmp_path / "pulumi-language-python").write_text("#!/bin/sh\n")
    (tmp_path / "pulumi-language-python").chmod(0o755)
    assert tools.own(pinned) == pulumi
    assert tools.own(cache.tool("pulumi-language-python")) == tmp_path / "pulumi-language-python"
    for refused in ("3.100.0", "4.0.0"):
        install(refused)
        assert tools.own(pinned) is None


def test_the_table_lists_every_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path))
    lines = tools.table().splitlines()
    assert [line.split()[0] for line in lines[1:]] == [tool.name for tool in TOOLS]


def test_records_of_built_tools_are_plain_json(one_module: Tool, tmp_path: Path) -> None:
    staged = tmp_path / "staged"
    staged.mkdir()
    (staged / "demo").write_bytes(b"x")
    cache.install(one_module, staged, 2.0)
    assert json.loads((cache.folder(one_module) / "built.json").read_text()) == {"version": "1.0", "seconds": 2.0, "size": 1}
