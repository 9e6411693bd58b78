"""The program: read the stack, build the layers of the platform, deploy its runs."""

from __future__ import annotations

from pathlib import Path

import pulumi

from infra import labels
from infra.kubernetes.cluster import connect
from infra.kubernetes.controllers import Controllers
from infra.kubernetes.queues import Queues
from infra.kubernetes.tenancy import TeamSpace, training_priority_class
from infra.plan import plan
from infra.runs.component import TrainingRun
from infra.runs.job import Surroundings
from infra.store import credentials_from_environment, store_behind_endpoint

stack = plan(Path(__file__).parent)
config, target = stack.config, stack.cluster()
credentials = credentials_from_environment()

cluster = connect(target.kubeconfig)
in_cluster = pulumi.ResourceOptions(provider=cluster)

controllers = Controllers(target.charts, target.images, config.controllers, opts=in_cluster)
priority_class = training_priority_class(in_cluster)
spaces = [
    TeamSpace(team, quota, target.object_store, credentials, opts=in_cluster)
    for team, quota in zip(config.teams, stack.quotas, strict=True)
]
queues = Queues(config.node_groups, stack.quotas, config.priorities, after=[*controllers.releases, *spaces], opts=in_cluster)
store = store_behind_endpoint(target.object_store, config.storage)

surroundings = Surroundings(
    image=target.images.trainer,
    git_sha=config.git_sha,
    bucket=store.bucket,
    region=store.region,
    endpoint=store.endpoint,
    credentials_secret=labels.STORE_SECRET,
)
runs = [TrainingRun(run, surroundings, after=[queues, store.ready, priority_class], opts=in_cluster) for run in stack.runs]

pulumi.export("kubeconfig", str(target.kubeconfig))
pulumi.export("bucket", store.bucket)
pulumi.export("queues", [team.name for team in config.teams])
pulumi.export("runs", {run.name: {"namespace": one.namespace, "job": one.job_name} for run, one in zip(stack.runs, runs, strict=True)})
