"""The restore drill of a run: a CronJob that loads the last known good checkpoint back on another number of processes."""

from __future__ import annotations

import pulumi
from pulumi_kubernetes.batch.v1 import CronJobSpecArgs, JobSpecArgs, JobTemplateSpecArgs
from pulumi_kubernetes.meta.v1 import ObjectMetaArgs

from infra import labels
from infra.runs import job
from infra.runs.file import RunFile
from infra.runs.sections import Drill

HISTORY = 3
"""Drills that passed, and drills that failed, whose Jobs stay to be looked at."""

LATE_SECONDS = 3600
"""A drill that could not be started for this long, because the cluster was down, is left out."""

_GRACE_SECONDS = 10


def metadata(run: RunFile) -> ObjectMetaArgs:
    """Return the metadata of the CronJob. Its name is fixed: a generated one could be longer than the 52 characters it may have."""
    return ObjectMetaArgs(
        name=f"{run.name}-drill", namespace=labels.team_namespace(run.team), labels=labels.of_run(run.name, run.team, labels.DRILL)
    )


def spec(run: RunFile, drill: Drill, where: job.Surroundings, config_map: pulumi.Input[str]) -> CronJobSpecArgs:
    """Return the CronJob."""
    return CronJobSpecArgs(
        schedule=drill.schedule,
        # A drill that still waits for quota stands for the next one.
        concurrency_policy="Forbid",
        starting_deadline_seconds=LATE_SECONDS,
        successful_jobs_history_limit=HISTORY,
        failed_jobs_history_limit=HISTORY,
        job_template=JobTemplateSpecArgs(
            # The Jobs, not the CronJob, name the queue: Kueue admits each one by itself.
            metadata=ObjectMetaArgs(labels=labels.of_run(run.name, run.team, labels.DRILL) | job.queue(run)),
            spec=_job(run, drill, where, config_map),
        ),
    )


def _job(run: RunFile, drill: Drill, where: job.Surroundings, config_map: pulumi.Input[str]) -> JobSpecArgs:
    resources, gpus = run.resources, {labels.GPU: str(drill.world_size)}
    return JobSpecArgs(
        suspend=True,
        # A drill that fails is news, not something to try again.
        backoff_limit=0,
        # Counted from its start, not while it waits for quota.
        active_deadline_seconds=run.max_seconds,
        template=job.pod(
            run,
            where,
            config_map,
            role=labels.DRILL,
            command=["training", "drill", "--world-size", str(drill.world_size), "--steps", str(drill.steps)],
            requests={"cpu": resources.cpu, "memory": resources.memory, **gpus},
            limits={"memory": resources.limit, **gpus},
            grace_seconds=_GRACE_SECONDS,
        ),
    )
