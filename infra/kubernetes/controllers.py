"""The controllers the platform relies on, from their charts: Kueue first, then JobSet."""

from __future__ import annotations

from typing import Any

import pulumi
import yaml
from pulumi_kubernetes.core.v1 import Namespace
from pulumi_kubernetes.helm.v3 import Release, RepositoryOptsArgs
from pulumi_kubernetes.meta.v1 import ObjectMetaArgs

from infra import labels
from infra.kubernetes.tenancy import pod_security
from infra.quantities import memory_bytes
from infra.settings import Chart, Charts, ControllerRequests, Images

READY_SECONDS = 600
"""How long an admitted run may take until its pods run: node boot, image pull, the grace of an evicted run. Then it is requeued."""

_INSTALL_SECONDS = 300
_MEMORY_LIMIT = "512Mi"
"""Of a controller that asks for less."""
_FAST_PROBE = {"initialDelaySeconds": 1, "periodSeconds": 2}


class Controllers(pulumi.ComponentResource):
    """Kueue and JobSet, each ready before the next thing needs it."""

    def __init__(self, charts: Charts, images: Images, requests: ControllerRequests, opts: pulumi.ResourceOptions | None = None) -> None:
        """Install both charts. Kueue's webhooks must answer before anything they watch is created, so JobSet waits for it."""
        super().__init__("trainyard:kubernetes:Controllers", "controllers", None, opts)
        kueue = self._release("kueue", labels.KUEUE_NAMESPACE, charts.kueue, kueue_values(images.kueue, requests), [])
        jobset = self._release("jobset", labels.JOBSET_NAMESPACE, charts.jobset, jobset_values(images.jobset, requests), [kueue])
        self.releases: list[pulumi.Resource] = [kueue, jobset]
        self.register_outputs({})

    def _release(self, name: str, namespace: str, chart: Chart, values: dict[str, Any], after: list[pulumi.Resource]) -> Release:
        space = Namespace(
            namespace,
            metadata=ObjectMetaArgs(name=namespace, labels=pod_security(labels.managed())),
            opts=pulumi.ResourceOptions(parent=self),
        )
        return Release(
            name,
            name=name,
            namespace=namespace,
            chart=chart.chart,
            version=chart.version,
            repository_opts=RepositoryOptsArgs(repo=chart.repository) if chart.repository else None,
            values=values,
            # A failed installation leaves nothing behind, so that the next `pulumi up` simply tries again.
            atomic=True,
            timeout=_INSTALL_SECONDS,
            opts=pulumi.ResourceOptions(parent=self, depends_on=[space, *after]),
        )


def kueue_values(image: str | None, requests: ControllerRequests) -> dict[str, Any]:
    """Return the values of Kueue's chart."""
    manager: dict[str, Any] = {"resources": _resources(requests)}
    if image:
        manager["image"] = _image(image)
    return {
        "controllerManager": {"manager": manager, "readinessProbe": _FAST_PROBE},
        "managerConfig": {"controllerManagerConfigYaml": yaml.safe_dump(kueue_configuration(), sort_keys=True)},
    }


def jobset_values(image: str | None, requests: ControllerRequests) -> dict[str, Any]:
    """Return the values of JobSet's chart."""
    values: dict[str, Any] = {"controller": {"resources": _resources(requests)}}
    return values | ({"image": _image(image)} if image else {})


def kueue_configuration() -> dict[str, Any]:
    """Return Kueue's own configuration: only what the platform uses, and only in the namespaces of teams.

    The chart copies the namespace selector into its webhooks, so a Kueue that is down stops nothing outside those namespaces.
    """
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": ":8081"},
        "metrics": {"bindAddress": ":8443", "enableClusterQueueResources": True},
        "webhook": {"port": 9443},
        "leaderElection": {"leaderElect": True, "resourceName": "c1f6bfd2.kueue.x-k8s.io"},
        "integrations": {"frameworks": ["batch/job", "jobset.x-k8s.io/jobset"]},
        "manageJobsWithoutQueueName": False,
        "managedJobsNamespaceSelector": {"matchExpressions": [{"key": labels.TEAM, "operator": "Exists"}]},
        "waitForPodsReady": {
            "timeout": f"{READY_SECONDS}s",
            "recoveryTimeout": f"{READY_SECONDS}s",
            "blockAdmission": False,
            "requeuingStrategy": {"timestamp": "Eviction", "backoffBaseSeconds": 60, "backoffMaxSeconds": 3600},
        },
    }


def _resources(requests: ControllerRequests) -> dict[str, Any]:
    limit = max(_MEMORY_LIMIT, requests.memory, key=memory_bytes)
    return {"requests": {"cpu": requests.cpu, "memory": requests.memory}, "limits": {"cpu": "2", "memory": limit}}


def _image(reference: str) -> dict[str, str]:
    repository, _, tag = reference.rpartition(":")
    return {"repository": repository, "tag": tag, "pullPolicy": "IfNotPresent"}
