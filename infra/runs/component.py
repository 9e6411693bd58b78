"""A training run as one Pulumi component: configuration, network rule, preparation of the data, training Job, restore drill."""

from __future__ import annotations

from collections.abc import Sequence

import pulumi
from pulumi_kubernetes.batch.v1 import CronJob, Job
from pulumi_kubernetes.core.v1 import ConfigMap
from pulumi_kubernetes.meta.v1 import ObjectMetaArgs
from pulumi_kubernetes.networking.v1 import NetworkPolicy

from infra import labels
from infra.kubernetes.network import between_pods_of_run
from infra.runs import drill, job
from infra.runs.file import RunFile
from infra.runs.sections import Drill

_NEW_JOB_ON = ["metadata.labels", "spec.podFailurePolicy", "spec.podReplacementPolicy", "spec.completionMode"]
"""Beside what the provider replaces a Job for by itself: fields the API server or the queue refuses to change in place."""

_OWNED_BY_QUEUE = [
    # Kueue takes `suspend` back and forth and pins the admitted pods to the nodes of their flavor.
    "spec.suspend",
    "spec.template.spec.nodeSelector",
    "spec.template.spec.tolerations",
    "spec.template.spec.schedulingGates",
]


class TrainingRun(pulumi.ComponentResource):
    """One run file, deployed. The Job is named anew for each version of the run file; the run keeps its name and resumes."""

    def __init__(
        self, run: RunFile, where: job.Surroundings, after: Sequence[pulumi.Resource], opts: pulumi.ResourceOptions | None = None
    ) -> None:
        """Deploy `run` once everything in `after` is there."""
        super().__init__("trainyard:runs:TrainingRun", run.name, None, opts)
        self._run, self._where = run, where
        self._config_map = self._configuration(after)
        policy = self._network(after)
        ready = [policy, *after]
        prepared = [] if run.data.packed else [self._preparation(ready)]
        self.namespace = labels.team_namespace(run.team)
        self.job = self._training([*prepared, *ready])
        if run.drill:
            self._drill(run.drill, ready)
        self.job_name = self.job.metadata.name
        self.register_outputs({"namespace": self.namespace, "job": self.job_name})

    def _configuration(self, after: Sequence[pulumi.Resource]) -> ConfigMap:
        run = self._run
        return ConfigMap(
            run.name,
            metadata=ObjectMetaArgs(namespace=labels.team_namespace(run.team), labels=labels.of_run(run.name, run.team)),
            immutable=True,
            data={job.CONFIG_FILE: pulumi.Output.json_dumps(job.trainer_config(run, self._where.bucket), sort_keys=True)},
            opts=pulumi.ResourceOptions(parent=self, depends_on=after),
        )

    def _network(self, after: Sequence[pulumi.Resource]) -> NetworkPolicy:
        run = self._run
        name = f"run-{run.name}"
        return NetworkPolicy(
            name,
            metadata=ObjectMetaArgs(name=name, namespace=labels.team_namespace(run.team), labels=labels.of_run(run.name, run.team)),
            spec=between_pods_of_run(run.name),
            opts=pulumi.ResourceOptions(parent=self, depends_on=after),
        )

    def _preparation(self, after: Sequence[pulumi.Resource]) -> Job:
        return Job(
            f"{self._run.name}-prepare",
            metadata=job.preparation_metadata(self._run),
            spec=job.preparation_spec(self._run, self._where, self._config_map.metadata.name),
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=after,
                ignore_changes=_OWNED_BY_QUEUE,
                replace_on_changes=_NEW_JOB_ON,
                custom_timeouts=pulumi.CustomTimeouts(create=f"{job.PREPARE_SECONDS}s"),
            ),
        )

    def _training(self, after: Sequence[pulumi.Resource]) -> Job:
        return Job(
            self._run.name,
            metadata=job.training_metadata(self._run),
            spec=job.training_spec(self._run, self._where, self._config_map.metadata.name),
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=after,
                # Two Jobs of one run would write the same checkpoints: the old one goes first.
                delete_before_replace=True,
                ignore_changes=_OWNED_BY_QUEUE,
                replace_on_changes=_NEW_JOB_ON,
                custom_timeouts=pulumi.CustomTimeouts(delete=f"{self._run.grace_seconds + 120}s"),
            ),
        )

    def _drill(self, one: Drill, after: Sequence[pulumi.Resource]) -> CronJob:
        return CronJob(
            f"{self._run.name}-drill",
            metadata=drill.metadata(self._run),
            spec=drill.spec(self._run, one, self._where, self._config_map.metadata.name),
            opts=pulumi.ResourceOptions(parent=self, depends_on=after),
        )
