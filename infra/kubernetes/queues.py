"""The queues: one flavor per node group, one queue per team in one cohort, and the priorities of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pulumi

from infra import labels
from infra.capacity import FlavorQuota, TeamQuota
from infra.settings import NodeGroup

API_VERSION = "kueue.x-k8s.io/v1beta2"
COVERED = ("cpu", "memory", labels.GPU)


class KueueObject(pulumi.CustomResource):
    """An object of Kueue's API. Unlike the SDK's CustomResource it carries fields outside `spec`; WorkloadPriorityClass has such."""

    def __init__(self, name: str, kind: str, metadata: dict[str, Any], body: dict[str, Any], opts: pulumi.ResourceOptions) -> None:
        """Create the object; `body` holds its top-level fields beside metadata."""
        properties = {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, **body}
        super().__init__(f"kubernetes:{API_VERSION}:{kind}", name, properties, opts)


def flavor_spec(group: NodeGroup) -> dict[str, Any]:
    """Return the flavor of a node group: its nodes by their own label, and the tolerations its runs are given."""
    spec: dict[str, Any] = {"nodeLabels": {labels.NODE_GROUP: group.name}}
    if group.taints:
        spec["nodeTaints"] = [taint.model_dump() for taint in group.taints]
        spec["tolerations"] = [{"key": taint.key, "operator": "Exists", "effect": taint.effect} for taint in group.taints]
    return spec


def cluster_queue_spec(quota: TeamQuota) -> dict[str, Any]:
    """Return the queue of a team: its own share, what it may borrow, and whom it may evict."""
    return {
        "cohortName": labels.COHORT,
        "queueingStrategy": "BestEffortFIFO",
        "namespaceSelector": {"matchLabels": {labels.TEAM: quota.team}},
        "resourceGroups": [{"coveredResources": list(COVERED), "flavors": [_flavor_quota(flavor) for flavor in quota.flavors]}],
        # A team gets its guaranteed share back from borrowers at once; inside a team the more important run wins.
        "preemption": {"withinClusterQueue": "LowerPriority", "reclaimWithinCohort": "Any"},
    }


def _flavor_quota(flavor: FlavorQuota) -> dict[str, Any]:
    nominal, borrowing = flavor.nominal.resources(), flavor.borrowing.resources()
    resources = [{"name": name, "nominalQuota": nominal[name], "borrowingLimit": borrowing[name]} for name in COVERED]
    return {"name": flavor.group, "resources": resources}


class Queues(pulumi.ComponentResource):
    """Flavors, queues and priorities. Namespaces of the teams must be there."""

    def __init__(
        self,
        groups: Sequence[NodeGroup],
        quotas: Sequence[TeamQuota],
        priorities: Mapping[str, int],
        after: Sequence[pulumi.Resource],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """Create the objects once Kueue, in `after`, answers."""
        super().__init__("trainyard:kubernetes:Queues", "queues", None, opts)
        child = pulumi.ResourceOptions(parent=self, depends_on=after)
        for name, value in priorities.items():
            KueueObject(f"priority-{name}", "WorkloadPriorityClass", _metadata(name), {"value": value}, child)
        flavors = [KueueObject(f"flavor-{g.name}", "ResourceFlavor", _metadata(g.name), {"spec": flavor_spec(g)}, child) for g in groups]
        self.entries = [self._team(quota, [*after, *flavors]) for quota in quotas]
        self.register_outputs({})

    def _team(self, quota: TeamQuota, after: Sequence[pulumi.Resource]) -> KueueObject:
        team = quota.team
        opts = pulumi.ResourceOptions(parent=self, depends_on=after)
        queue = KueueObject(f"queue-{team}", "ClusterQueue", _metadata(team), {"spec": cluster_queue_spec(quota)}, opts)
        return KueueObject(
            f"entry-{team}",
            "LocalQueue",
            {"name": team, "namespace": labels.team_namespace(team), "labels": labels.of_team(team)},
            {"spec": {"clusterQueue": team}},
            pulumi.ResourceOptions(parent=self, depends_on=[queue]),
        )


def _metadata(name: str) -> dict[str, Any]:
    return {"name": name, "labels": labels.managed()}
