"""Everything that is decided before the first resource: configuration, run files and quotas, checked against each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pulumi

from infra.capacity import TeamQuota, run_problems, share_problems, team_quotas
from infra.config import PREFIX, ExistingCluster, existing_cluster, load, load_stack, stack_file
from infra.problems import ConfigError, Problem
from infra.runs.file import RunFile, load_run
from infra.settings import PlatformConfig


@dataclass(frozen=True)
class Plan:
    """A stack that holds together."""

    config: PlatformConfig
    file: str
    root: Path
    runs: tuple[RunFile, ...]
    quotas: tuple[TeamQuota, ...]

    def cluster(self) -> ExistingCluster:
        """Return the cluster to deploy to. Raises one clear sentence when this version cannot deploy the stack."""
        if self.config.provider == "eks":
            stack = self.file.removeprefix("Pulumi.").removesuffix(".yaml")
            raise pulumi.RunError(
                f"stack {stack} asks for provider eks, which this version cannot deploy yet; "
                f"set {PREFIX}provider: existing and {PREFIX}kubeconfig in {self.file} to use a cluster that is already there."
            )
        return existing_cluster(self.config, self.root, self.file)


def plan(root: Path) -> Plan:
    """Return the plan of the stack the engine is running."""
    file = stack_file(pulumi.get_stack())
    return _checked(load(root), root, file)


def plan_of_file(path: Path, root: Path) -> Plan:
    """Return the plan of a stack file, without an engine."""
    return _checked(load_stack(path, root), root, path.name)


def _checked(config: PlatformConfig, root: Path, file: str) -> Plan:
    runs, problems = _runs(config, root, file)
    problems.extend(share_problems(config, file))
    problems.extend(run_problems(config, runs))
    if problems:
        raise ConfigError(problems)
    return Plan(config, file, root, tuple(runs.values()), team_quotas(config))


def _runs(config: PlatformConfig, root: Path, file: str) -> tuple[dict[str, RunFile], list[Problem]]:
    runs: dict[str, RunFile] = {}
    problems: list[Problem] = []
    for index, name in enumerate(config.runs):
        if not (root / name).is_file():
            problems.append(
                Problem(
                    file,
                    f"{PREFIX}runs[{index}]",
                    f"names {name}, which is not a file",
                    allowed=", ".join(_run_files(root)) or "a run file",
                )
            )
            continue
        try:
            runs[name] = load_run(root / name, name)
        except ConfigError as error:
            problems.extend(error.problems)
    problems.extend(_same_names(runs, file))
    return runs, problems


def _same_names(runs: dict[str, RunFile], file: str) -> Iterable[Problem]:
    for name, count in Counter(run.name for run in runs.values()).items():
        if count > 1:
            files = ", ".join(path for path, run in runs.items() if run.name == name)
            yield Problem(
                file,
                f"{PREFIX}runs",
                f"{count} run files have the name {name!r}: {files}",
                allowed="each run name once; the same name is the same run",
            )


def _run_files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in (root / "runs").glob("*.yaml"))
