"""A team's place in the cluster: namespace, limits, identity, read access and network rules."""

from __future__ import annotations

from collections.abc import Sequence

import pulumi
from pulumi_kubernetes.core.v1 import (
    LimitRange,
    LimitRangeItemArgs,
    LimitRangeSpecArgs,
    Namespace,
    ResourceQuota,
    ResourceQuotaSpecArgs,
    Secret,
    ServiceAccount,
)
from pulumi_kubernetes.meta.v1 import ObjectMetaArgs
from pulumi_kubernetes.rbac.v1 import PolicyRuleArgs, Role, RoleBinding, RoleRefArgs, SubjectArgs
from pulumi_kubernetes.scheduling.v1 import PriorityClass

from infra import labels
from infra.capacity import TeamQuota
from infra.kubernetes.network import team_policies
from infra.settings import StoreEndpoint, Team

OBJECT_LIMITS = {"count/jobs.batch": "200", "count/configmaps": "500", "count/services.loadbalancers": "0"}
"""Bounds on what one team can put into the API server's store; load balancers would open a way in past the network rules."""

_VIEWABLE = {
    "": ["pods", "pods/log", "events", "configmaps", "resourcequotas"],
    "batch": ["jobs", "cronjobs"],
    "jobset.x-k8s.io": ["jobsets"],
    "kueue.x-k8s.io": ["workloads", "localqueues"],
}


def pod_security(namespace_labels: dict[str, str]) -> dict[str, str]:
    """Return `namespace_labels` with the strictest Pod Security level enforced, warned about and audited."""
    modes = ("enforce", "warn", "audit")
    return namespace_labels | {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in modes}


def training_priority_class(opts: pulumi.ResourceOptions) -> PriorityClass:
    """Create the one class of all training pods.

    It never preempts: the scheduler would take single pods out of a run that is admitted as a whole.
    Which run matters more is the queue's business.
    """
    name = labels.TRAINING_PRIORITY_CLASS
    return PriorityClass(
        name,
        metadata=ObjectMetaArgs(name=name, labels=labels.managed()),
        value=1000,
        global_default=False,
        preemption_policy="Never",
        description="Pods of training runs; order among runs is decided by the queue",
        opts=opts,
    )


class TeamSpace(pulumi.ComponentResource):
    """The namespace of a team and all rules in it."""

    def __init__(
        self,
        team: Team,
        quota: TeamQuota,
        store: StoreEndpoint | None,
        credentials: dict[str, pulumi.Output[str]] | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """Create the space; `credentials` become the Secret pods read the object store's keys from."""
        super().__init__("trainyard:kubernetes:TeamSpace", f"team-{team.name}", None, opts)
        self._team = team
        namespace = Namespace(
            labels.team_namespace(team.name),
            metadata=ObjectMetaArgs(name=labels.team_namespace(team.name), labels=pod_security(labels.of_team(team.name))),
            opts=pulumi.ResourceOptions(parent=self),
        )
        self._child = pulumi.ResourceOptions(parent=self, depends_on=[namespace])
        self._limits(quota)
        self._identity()
        self._viewers()
        if credentials is not None:
            self._credentials(credentials)
        team_policies(team.name, store, self._child)
        self.namespace = namespace.metadata.name
        self.register_outputs({"namespace": self.namespace})

    def _metadata(self, name: str) -> ObjectMetaArgs:
        return ObjectMetaArgs(name=name, namespace=labels.team_namespace(self._team.name), labels=labels.of_team(self._team.name))

    def _limits(self, quota: TeamQuota) -> None:
        hard = {f"requests.{resource}": amount for resource, amount in quota.namespace_limit.resources().items()}
        ResourceQuota(
            f"{self._team.name}-quota",
            metadata=self._metadata("quota"),
            spec=ResourceQuotaSpecArgs(hard=hard | OBJECT_LIMITS),
            opts=self._child,
        )
        # The quota counts requests, so a pod that states none is given some.
        item = LimitRangeItemArgs(type="Container", default={"memory": "512Mi"}, default_request={"cpu": "100m", "memory": "128Mi"})
        LimitRange(
            f"{self._team.name}-defaults", metadata=self._metadata("defaults"), spec=LimitRangeSpecArgs(limits=[item]), opts=self._child
        )

    def _identity(self) -> None:
        ServiceAccount(
            f"{self._team.name}-trainer",
            metadata=self._metadata(labels.TRAINER_SERVICE_ACCOUNT),
            automount_service_account_token=False,
            opts=self._child,
        )

    def _viewers(self) -> None:
        rules = [PolicyRuleArgs(api_groups=[group], resources=kinds, verbs=["get", "list", "watch"]) for group, kinds in _VIEWABLE.items()]
        Role(f"{self._team.name}-viewer", metadata=self._metadata("viewer"), rules=rules, opts=self._child)
        if self._team.viewers:
            RoleBinding(
                f"{self._team.name}-viewer",
                metadata=self._metadata("viewer"),
                role_ref=RoleRefArgs(api_group="rbac.authorization.k8s.io", kind="Role", name="viewer"),
                subjects=_groups(self._team.viewers),
                opts=self._child,
            )

    def _credentials(self, credentials: dict[str, pulumi.Output[str]]) -> None:
        Secret(
            f"{self._team.name}-{labels.STORE_SECRET}",
            metadata=self._metadata(labels.STORE_SECRET),
            type="Opaque",
            string_data=credentials,
            opts=pulumi.ResourceOptions.merge(self._child, pulumi.ResourceOptions(additional_secret_outputs=["data", "stringData"])),
        )


def _groups(names: Sequence[str]) -> list[SubjectArgs]:
    return [SubjectArgs(api_group="rbac.authorization.k8s.io", kind="Group", name=name) for name in names]
