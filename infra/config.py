"""The one reader of configuration: the engine's or a stack file's keys, over the facts of the embedded platform, into one frozen model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pulumi
import pulumi.runtime.config as engine_config
import yaml
from pydantic import ValidationError

from infra.problems import ConfigError, Problem, dotted, explain, paste
from infra.settings import Charts, Images, PlatformConfig, StoreEndpoint

PROJECT = "trainyard"
PREFIX = f"{PROJECT}:"

_FACTS = ("kubeconfig", "objectStore", "images", "gitSha")
"""Keys the facts of the embedded platform share with the configuration; `charts` differs in shape."""

_NOT_GIVEN = (None, "", {})
"""Pulumi.yaml makes a key optional by an empty default only."""


@dataclass(frozen=True)
class ExistingCluster:
    """All that must be known to deploy to a cluster that is already there."""

    kubeconfig: Path
    images: Images
    object_store: StoreEndpoint
    charts: Charts


def load(project_root: Path) -> PlatformConfig:
    """Return the configuration of the stack the engine is running. Raises ConfigError with every problem."""
    return parse(engine_values(), project_root, stack_file(pulumi.get_stack()))


def load_stack(path: Path, project_root: Path) -> PlatformConfig:
    """Return the configuration in a stack file, without an engine. Raises ConfigError with every problem."""
    return parse(stack_values(path), project_root, path.name)


def stack_file(stack: str) -> str:
    """Return the name of the file that configures a stack."""
    return f"Pulumi.{stack}.yaml"


def parse(values: Mapping[str, Any], project_root: Path, file: str) -> PlatformConfig:
    """Validate the keys of a stack, with the facts of the embedded platform beneath them."""
    given = {key: value for key, value in values.items() if value not in _NOT_GIVEN}
    merged = {**_facts(given.get("platform"), project_root, file), **given}
    try:
        config = PlatformConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(explain(error, PlatformConfig, file, merged, PREFIX)) from None
    if problems := list(_inconsistencies(config, file)):
        raise ConfigError(problems)
    return config


def engine_values() -> dict[str, Any]:
    """Return the keys of this project as the engine passes them: text, or JSON where a key holds a list or a map."""
    given = engine_config.get_config_env() | engine_config.CONFIG.get()
    return {key.removeprefix(PREFIX): _decoded(value) for key, value in given.items() if key.startswith(PREFIX)}


def stack_values(path: Path) -> dict[str, Any]:
    """Return the keys of this project in a stack file."""
    document = read_yaml(path, path.name)
    config = document.get("config") or {}
    if not isinstance(config, dict):
        raise ConfigError([Problem(path.name, "config", "is not a map of keys", paste=f"config:\n  {PREFIX}provider: existing\n")])
    return {key.removeprefix(PREFIX): value for key, value in config.items() if str(key).startswith(PREFIX)}


def read_yaml(path: Path, file: str) -> dict[str, Any]:
    """Return a YAML file that holds a map. `file` is its name in messages."""
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError([Problem(file, "", f"cannot be read: {error.strerror}")]) from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" near line {where.line + 1}" if where else ""
        raise ConfigError(
            [Problem(file, "", f"is not valid YAML{line}: {getattr(error, 'problem', None) or 'cannot be parsed'}")]
        ) from None
    if not isinstance(document, dict):
        raise ConfigError([Problem(file, "", "must hold a map of keys")])
    return document


def existing_cluster(config: PlatformConfig, project_root: Path, file: str) -> ExistingCluster:
    """Return the cluster to deploy to, or say what is missing."""
    kubeconfig, images, store, charts = config.kubeconfig, config.images, config.object_store, config.charts
    if kubeconfig is None or images is None or store is None or charts is None:
        raise ConfigError(_missing_parts(config, project_root, file))
    path = project_root / Path(kubeconfig).expanduser()
    if not path.is_file():
        raise ConfigError(
            [Problem(file, f"{PREFIX}kubeconfig", f"names {path}, which is not a file", allowed="the kubeconfig of a running cluster")]
        )
    return ExistingCluster(path, images, store, charts)


def _missing_parts(config: PlatformConfig, project_root: Path, file: str) -> list[Problem]:
    parts = {"kubeconfig": config.kubeconfig, "images": config.images, "objectStore": config.object_store, "charts": config.charts}
    missing = [name for name, value in parts.items() if value is None]
    if config.platform and not (project_root / config.platform).exists():
        wrong = f"names {config.platform}, which does not exist; start the embedded platform with `make up`, which writes it"
        instead = f"or set {', '.join(PREFIX + name for name in missing)} for a cluster of your own"
        return [Problem(file, f"{PREFIX}platform", wrong, allowed=instead)]
    return [_missing_part(name, file) for name in missing]


def _missing_part(name: str, file: str) -> Problem:
    field = next(field for field in PlatformConfig.model_fields.values() if field.alias == name)
    sample = (field.examples or [None])[0]
    return Problem(file, PREFIX + name, "is missing; provider `existing` needs it", field.description or "", paste((name,), sample, PREFIX))


def _facts(name: Any, project_root: Path, file: str) -> dict[str, Any]:
    """Return the facts of the embedded platform as configuration keys; nothing while it has not been started."""
    if not isinstance(name, str) or not (path := project_root / name).exists():
        return {}
    try:
        facts = json.loads(path.read_text())
        known: dict[str, Any] = {key: facts[key] for key in _FACTS if key in facts}
        charts = {"charts": {chart: {"chart": folder} for chart, folder in facts["charts"].items()}} if "charts" in facts else {}
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(
            [Problem(file, f"{PREFIX}platform", f"names {name}, which is not a facts file; write it again with `make up`")]
        ) from None
    return known | charts


def _decoded(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _inconsistencies(config: PlatformConfig, file: str) -> Iterable[Problem]:
    yield from _duplicates("nodeGroups", [group.name for group in config.node_groups], file)
    yield from _duplicates("teams", [team.name for team in config.teams], file)
    groups = [group.name for group in config.node_groups]
    for index, team in enumerate(config.teams):
        for key, shares in (("gpus", team.gpus), ("borrow", team.borrow)):
            for group in shares:
                if group not in groups:
                    where: tuple[str | int, ...] = ("teams", index, key)
                    yield Problem(
                        file,
                        dotted((*where, group), PREFIX),
                        f"{group!r} is not a node group",
                        allowed=", ".join(groups),
                        paste=paste(where, {groups[0]: shares[group]}, PREFIX),
                    )


def _duplicates(key: str, names: list[str], file: str) -> Iterable[Problem]:
    for name, count in Counter(names).items():
        if count > 1:
            yield Problem(file, PREFIX + key, f"{count} entries have the name {name!r}", allowed="each name once")
