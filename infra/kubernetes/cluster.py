"""The connection to a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pulumi_kubernetes as kubernetes
import yaml

from infra.problems import ConfigError, Problem


def connect(kubeconfig: Path) -> kubernetes.Provider:
    """Return the provider of the cluster of the kubeconfig's current context.

    The address of its API server is its identity: new certificates change nothing, another address is another cluster.
    """
    return kubernetes.Provider(
        "cluster", kubeconfig=str(kubeconfig), cluster_identifier=server_of(kubeconfig), enable_server_side_apply=True
    )


def server_of(kubeconfig: Path) -> str:
    """Return the address of the API server of the current context."""
    try:
        document = yaml.safe_load(kubeconfig.read_text())
        context = _named(document["contexts"], document["current-context"])["context"]
        return _named(document["clusters"], context["cluster"])["cluster"]["server"]
    except (OSError, yaml.YAMLError, LookupError, TypeError, StopIteration):
        raise ConfigError(
            [Problem(str(kubeconfig), "", "is not a kubeconfig with a current-context; write it again or name another one")]
        ) from None


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(entry for entry in entries if entry["name"] == name)
