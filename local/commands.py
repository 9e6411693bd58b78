"""What each command of the Makefile does, and what it says when it cannot."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType

from local import bootstrap, paths, python
from local.errors import Problem
from local.progress import Progress, clock

_FAILED, _INTERRUPTED = 1, 130
TIERS = ("unit", "program", "policies", "trainer", "engine", "cluster", "faults")


def main(arguments: list[str]) -> int:
    """Run one command and return its exit code; a `Problem` is printed, never a traceback."""
    parser = argparse.ArgumentParser(prog="python3 -m local", description="The embedded platform of trainyard.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (function, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(function=function)
        if name in ("logs", "up"):
            command.add_argument("run", nargs="?", default=None, help="a run of the stack, by its name")
        if name == "test":
            command.add_argument("tests", nargs="*", default=["tests"], help="paths of tests; all by default")
    options = parser.parse_args(arguments)
    try:
        return options.function(options)
    except Problem as problem:
        print(f"\n{problem}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        print("\ninterrupted; run the command again to go on", file=sys.stderr)
        return _INTERRUPTED


def _up(options: argparse.Namespace) -> int:
    begun = time.monotonic()
    progress = Progress()
    with progress.running():
        bootstrap.enter(["up", *([options.run] if options.run else [])], python.BASE, platform=paths.embedded(), progress=progress)
        from local import stack, view

        stack.check()
        platform_up(progress)
    print(f"  platform ready after {clock(time.monotonic() - begun)}\n", flush=True)
    deploying = time.monotonic()
    stack.up()
    _record({**progress.seconds, "pulumi up": time.monotonic() - deploying})
    target = stack.target()
    return view.follow(options.run or target.runs[0], target.kubeconfig, target.store) if target.runs else 0


def platform_up(progress: Progress) -> None:
    """Bring tools, image and node to where the stack can be deployed; what is there already is left alone.

    Raises `Problem`: all of them when several lanes fail.
    """
    from local import stack, tools
    from local.images import trainer
    from local.node import lifecycle

    if not paths.embedded():
        tools.provide(progress, tools.ENGINE)
        return

    def image() -> trainer.Image:
        built = trainer.provide(progress)
        lifecycle.start_runtime()
        trainer.load(built, progress)
        return built

    with ThreadPoolExecutor(2) as lanes:
        built, _ = _results(lanes.submit(image), lanes.submit(tools.provide, progress))
    lifecycle.start(progress)
    stack.write_facts(built)


def _results(*lanes: Future) -> list:
    failures = [failure for lane in lanes if (failure := lane.exception())]
    for failure in failures:
        if not isinstance(failure, Problem):
            raise failure
    if failures:
        raise Problem("\n\n".join(map(str, failures)))
    return [lane.result() for lane in lanes]


def _record(seconds: dict[str, float]) -> None:
    """Keep what each phase took, for benchmarks/cold_start.py."""
    (paths.HOME / "phases.json").write_text(json.dumps({name: round(value, 2) for name, value in seconds.items()}, indent=2))


def _in_environment(command: list[str], requirements: str = python.BASE) -> None:
    progress = Progress()
    with progress.running():
        bootstrap.enter(command, requirements, platform=False, progress=progress)


def _down(_: argparse.Namespace) -> int:
    if not paths.HOME.exists():
        print("nothing is up")
        return 0
    _in_environment(["down"])
    from local.node import lifecycle

    lifecycle.stop()
    print(f"the node is down; its data stay in {paths.HOME.relative_to(paths.PROJECT)} for the next make up, make clean removes them")
    return 0


def _clean(_: argparse.Namespace) -> int:
    if not paths.HOME.exists():
        print("nothing to remove")
        return 0
    _in_environment(["clean"])
    from local.node import lifecycle

    lifecycle.stop()
    shutil.rmtree(paths.HOME)
    print(f"removed {paths.HOME.name}; built tools and image layers stay in {paths.cache()} (make purge removes them too)")
    return 0


def _purge(options: argparse.Namespace) -> int:
    if paths.HOME.exists():
        _in_environment(["purge"])
    from local.images import trainer

    trainer.purge()
    _clean(options)
    shutil.rmtree(paths.cache(), ignore_errors=True)
    print(f"removed {paths.cache()}")
    return 0


def _tools(_: argparse.Namespace) -> int:
    from local import tools

    progress = Progress()
    with progress.running():
        tools.provide(progress)
    print(tools.table())
    return 0


def _environment(_: argparse.Namespace) -> int:
    _in_environment(["environment"], python.DEVELOPMENT)
    return 0


def _platform(_: argparse.Namespace) -> int:
    progress = Progress()
    with progress.running():
        bootstrap.enter(["platform"], python.DEVELOPMENT, platform=True, progress=progress)
        platform_up(progress)
    return 0


def _test(options: argparse.Namespace) -> int:
    """Run the tests on a platform that is left as it was found: up when it was up, down when it was down."""
    progress = Progress()
    with progress.running():
        bootstrap.enter(["test", *options.tests], python.DEVELOPMENT, platform=True, progress=progress)
        from local.node import lifecycle

        was_up = any(lifecycle.states().values())
        platform_up(progress)
    try:
        return pytest(options.tests)
    finally:
        if was_up:
            lifecycle.start(Progress())  # tests stop it
        else:
            lifecycle.stop()


def pytest(tests: list[str]) -> int:
    """Run pytest on the paths, the whole suite in the order of its tiers: what is cheap and likely to fail comes first."""
    from local import stack

    chosen = [path for tier in TIERS if (path := f"tests/{tier}") and (paths.PROJECT / path).exists()] if tests == ["tests"] else tests
    command = [sys.executable, "-m", "pytest", *chosen]
    return subprocess.run(command, cwd=paths.PROJECT, env=stack.environment(), stdin=subprocess.DEVNULL, check=False).returncode


def _preview(_: argparse.Namespace) -> int:
    stack = _engine("preview")
    return stack.pulumi("preview", "--diff")


def _destroy(_: argparse.Namespace) -> int:
    stack = _engine("destroy")
    return stack.pulumi("destroy", "--yes", "--skip-preview")


def _engine(command: str) -> ModuleType:
    """Return what drives the engine, with its tools in place; raises `Problem` when there is nothing that it could look at."""
    _in_environment([command])
    from local import stack, tools

    if paths.embedded() and not paths.PLATFORM.exists():
        raise Problem("nothing is up", fix="make up")
    with Progress().running() as progress:
        tools.provide(progress, tools.ENGINE)
    return stack


def _status(_: argparse.Namespace) -> int:
    if not paths.HOME.exists():
        print("nothing is up; make up")
        return 0
    _in_environment(["status"])
    from local import stack, view

    if paths.embedded() and not _node_status():
        return 0
    target = stack.target()
    return view.status(target.kubeconfig, target.store)


def _node_status() -> bool:
    """Tell how the node is; return whether it is up."""
    from local.node import lifecycle

    states = lifecycle.states()
    dead = [name for name, pid in states.items() if pid is None]
    if len(dead) == len(states):
        print("the node is down; make up")
        return False
    print(
        f"node: {len(states) - len(dead)} of {len(states)} components run" + (f"; down: {', '.join(dead)} (make up heals)" if dead else "")
    )
    return True


def _logs(options: argparse.Namespace) -> int:
    _in_environment(["logs", *([options.run] if options.run else [])])
    from local import stack, view

    return view.logs(options.run, stack.target().kubeconfig)


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str]] = {
    "up": (_up, "set everything up, deploy the stack, follow its run"),
    "down": (_down, "stop the node; keep its data"),
    "clean": (_clean, "stop the node and remove everything generated in this checkout"),
    "purge": (_purge, "clean, and remove the cache of built tools and image layers too"),
    "tools": (_tools, "build what is missing and list every tool"),
    "environment": (_environment, "make the virtual environment with the development packages"),
    "platform": (_platform, "bring up tools, image and node without deploying the stack"),
    "test": (_test, "run the tests on the platform, which is left as it was found"),
    "preview": (_preview, "show what make up would change in the stack"),
    "destroy": (_destroy, "remove everything that the stack deployed, with the bucket where the stack file allows it"),
    "status": (_status, "show the node, the queues, the runs and the events that matter"),
    "logs": (_logs, "print the log of a run"),
}
