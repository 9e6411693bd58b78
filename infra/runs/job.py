"""A run file into Kubernetes objects. Pure: no resource is made here, so every field can be tested without an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pulumi
from pulumi_kubernetes.batch.v1 import JobSpecArgs, PodFailurePolicyArgs, PodFailurePolicyRuleArgs
from pulumi_kubernetes.batch.v1 import PodFailurePolicyOnExitCodesRequirementArgs as OnExitCodesArgs
from pulumi_kubernetes.batch.v1 import PodFailurePolicyOnPodConditionsPatternArgs as OnPodConditionArgs
from pulumi_kubernetes.core.v1 import (
    CapabilitiesArgs,
    ConfigMapVolumeSourceArgs,
    ContainerArgs,
    ContainerPortArgs,
    EmptyDirVolumeSourceArgs,
    EnvVarArgs,
    EnvVarSourceArgs,
    ObjectFieldSelectorArgs,
    PersistentVolumeClaimVolumeSourceArgs,
    PodSecurityContextArgs,
    PodSpecArgs,
    PodTemplateSpecArgs,
    ResourceRequirementsArgs,
    SeccompProfileArgs,
    SecretKeySelectorArgs,
    SecurityContextArgs,
    VolumeArgs,
    VolumeMountArgs,
)
from pulumi_kubernetes.meta.v1 import ObjectMetaArgs

from infra import labels
from infra.quantities import memory_bytes, memory_text
from infra.runs.file import RunFile
from infra.runs.sections import Section

CONFIG_FOLDER = "/etc/trainyard"
CONFIG_FILE = "run.json"

RETRIES = 3
"""Failures of unknown cause a run may have before it is given up. Evictions (42, 43) and disruptions do not count."""

PREPARE_RETRIES = 1
PREPARE_SECONDS = 1800
_PREPARE_REQUEST = {"cpu": "250m", "memory": "1Gi"}
_PREPARE_LIMIT = {"memory": "2Gi"}

EVICTED = (42, 43)
HOPELESS = (44, 45, 47, 48)
"""Configuration, data, no usable checkpoint: another attempt would end the same way. Superseded: another one is at work, leave it alone.

46 (preflight) and 49 (hung) may be transient: they have no rule, and count.
"""

IMDS = "http://169.254.169.254"
"""The metadata service of an EC2 instance, as seen from it."""

_SCRATCH = 2**30
"""Bytes of /tmp beside the cached shards. A pod that uses more of it than it has is taken off its node."""

_UID = 1000


@dataclass(frozen=True)
class Surroundings:
    """What a run needs to know of the platform it runs on."""

    image: str
    git_sha: str
    bucket: pulumi.Input[str]
    region: str
    endpoint: str | None = None
    credentials_secret: str | None = None


def trainer_config(run: RunFile, bucket: pulumi.Input[str]) -> dict[str, Any]:
    """Return what the trainer reads from its configuration file. What the run file leaves open is left to the trainer."""
    return {
        "run": run.name,
        "bucket": bucket,
        "model": run.model,
        "data": _data_config(run),
        "train": _given(run.train),
        "checkpoint": run.checkpoint.model_dump(exclude_none=True, exclude={"claim"}),
        "processes": run.resources.processes,
        "nodes": run.resources.nodes,
        "grace_seconds": run.grace_seconds,
    } | _optional_config(run)


def _data_config(run: RunFile) -> dict[str, Any]:
    data = run.data
    given = data.model_dump(exclude_none=True)
    if data.packed:
        place = urlsplit(data.source)
        return given | {"bucket": place.netloc, "prefix": place.path.strip("/")}
    return given | {"prefix": f"datasets/{data.name}"}


def _optional_config(run: RunFile) -> dict[str, Any]:
    """Return the parts of the trainer's configuration that the run file names, and no others."""
    sections = {"mesh": run.mesh, "preflight": run.preflight, "metrics": run.metrics}
    config: dict[str, Any] = {name: _given(section) for name, section in sections.items() if section}
    if run.eviction:
        address = {"metadata_service": IMDS} if run.eviction.metadata_service else {}
        config["eviction"] = run.eviction.model_dump(exclude_none=True, exclude={"metadata_service"}) | address
    if run.hang_seconds is not None:
        config["hang_seconds"] = run.hang_seconds
    if run.accept_changes:
        config["accept_changes"] = sorted(run.accept_changes)
    return config


def _given(section: Section) -> dict[str, Any]:
    return section.model_dump(exclude_none=True)


def queue(run: RunFile) -> dict[str, str]:
    """Return the labels by which Kueue takes a Job of a run up."""
    return {"kueue.x-k8s.io/queue-name": run.team, "kueue.x-k8s.io/priority-class": run.priority}


def training_metadata(run: RunFile) -> ObjectMetaArgs:
    """Return the metadata of the training Job. It has no name, so that a changed run file makes a new Job."""
    return ObjectMetaArgs(
        namespace=labels.team_namespace(run.team),
        labels=labels.of_run(run.name, run.team, "train") | queue(run) | {"kueue.x-k8s.io/max-exec-time-seconds": str(run.max_seconds)},
        annotations={
            # The run starts when the queue admits it, perhaps tomorrow: nobody waits for that.
            "pulumi.com/skipAwait": "true",
            # A replaced run must have left, its pods too, before the next one writes under the same name.
            "pulumi.com/deletionPropagationPolicy": "foreground",
        },
    )


def training_spec(run: RunFile, where: Surroundings, config_map: pulumi.Input[str]) -> JobSpecArgs:
    """Return the training Job."""
    resources = run.resources
    gpus = {labels.GPU: str(resources.gpus_per_node)}
    return JobSpecArgs(
        suspend=True,
        completions=1,
        parallelism=1,
        completion_mode="Indexed",
        backoff_limit=RETRIES,
        # The old pod may still hold the checkpoint open: the next starts when it has ended.
        pod_replacement_policy="Failed",
        pod_failure_policy=failure_policy(),
        template=pod(
            run,
            where,
            config_map,
            role="train",
            command=["training.launch"],
            requests={"cpu": resources.cpu, "memory": resources.memory, **gpus},
            limits={"memory": resources.limit, **gpus},
            grace_seconds=run.grace_seconds,
        ),
    )


def failure_policy() -> PodFailurePolicyArgs:
    """Return what the Job controller makes of the ways a training pod can end. The first rule that matches wins."""
    return PodFailurePolicyArgs(
        rules=[
            PodFailurePolicyRuleArgs(action="Ignore", on_pod_conditions=[OnPodConditionArgs(type="DisruptionTarget", status="True")]),
            PodFailurePolicyRuleArgs(action="Ignore", on_exit_codes=_exit_codes(EVICTED)),
            PodFailurePolicyRuleArgs(action="FailJob", on_exit_codes=_exit_codes(HOPELESS)),
        ]
    )


def _exit_codes(codes: tuple[int, ...]) -> OnExitCodesArgs:
    return OnExitCodesArgs(container_name="train", operator="In", values=list(codes))


def preparation_metadata(run: RunFile) -> ObjectMetaArgs:
    """Return the metadata of the preparation Job, which `pulumi up` waits for."""
    return ObjectMetaArgs(
        namespace=labels.team_namespace(run.team),
        labels=labels.of_run(run.name, run.team, "prepare") | queue(run),
        # One that failed is made again by the next `pulumi up`.
        annotations={"pulumi.com/replaceUnready": "true"},
    )


def preparation_spec(run: RunFile, where: Surroundings, config_map: pulumi.Input[str]) -> JobSpecArgs:
    """Return the preparation Job: it packs the dataset, or finds it packed and ends at once.

    It has no rule that fails it early: whoever waits for it recognises a Job that used up its retries, not one that a rule failed.
    """
    return JobSpecArgs(
        suspend=True,
        completions=1,
        parallelism=1,
        backoff_limit=PREPARE_RETRIES,
        template=pod(
            run,
            where,
            config_map,
            role="prepare",
            command=["training.prepare"],
            requests=_PREPARE_REQUEST,
            limits=_PREPARE_LIMIT,
            grace_seconds=10,
        ),
    )


def pod(
    run: RunFile,
    where: Surroundings,
    config_map: pulumi.Input[str],
    *,
    role: str,
    command: list[str],
    requests: dict[str, str],
    limits: dict[str, str],
    grace_seconds: int,
) -> PodTemplateSpecArgs:
    """Return a pod of a run with one container, named after its role. `command` is a module of the trainer and its arguments."""
    mounts = {"config": CONFIG_FOLDER, "tmp": "/tmp", "shm": "/dev/shm"}  # noqa: S108 (paths in the pod)
    volumes = [
        VolumeArgs(name="config", config_map=ConfigMapVolumeSourceArgs(name=config_map)),
        VolumeArgs(name="tmp", empty_dir=EmptyDirVolumeSourceArgs(size_limit=memory_text(_SCRATCH + run.data.cache_bytes))),
        VolumeArgs(name="shm", empty_dir=EmptyDirVolumeSourceArgs(medium="Memory", size_limit=shared_memory(limits["memory"]))),
    ]
    if run.checkpoint.folder and run.checkpoint.claim and role != "prepare":
        mounts["checkpoints"] = run.checkpoint.folder
        claim = PersistentVolumeClaimVolumeSourceArgs(claim_name=run.checkpoint.claim)
        volumes.append(VolumeArgs(name="checkpoints", persistent_volume_claim=claim))
    ports = [ContainerPortArgs(name="metrics", container_port=run.metrics.port)] if run.metrics and role == "train" else None
    return PodTemplateSpecArgs(
        metadata=ObjectMetaArgs(labels=labels.of_run(run.name, run.team, role)),
        spec=PodSpecArgs(
            restart_policy="Never",
            priority_class_name=labels.TRAINING_PRIORITY_CLASS,
            service_account_name=labels.TRAINER_SERVICE_ACCOUNT,
            automount_service_account_token=False,
            enable_service_links=False,
            termination_grace_period_seconds=grace_seconds,
            security_context=PodSecurityContextArgs(
                run_as_non_root=True,
                run_as_user=_UID,
                run_as_group=_UID,
                fs_group=_UID,
                seccomp_profile=SeccompProfileArgs(type="RuntimeDefault"),
            ),
            volumes=volumes,
            containers=[
                ContainerArgs(
                    name=role,
                    image=where.image,
                    image_pull_policy="IfNotPresent",
                    command=["python", "-m", *command, "--config", f"{CONFIG_FOLDER}/{CONFIG_FILE}"],
                    env=environment(where),
                    resources=ResourceRequirementsArgs(requests=requests, limits=limits),
                    security_context=SecurityContextArgs(
                        allow_privilege_escalation=False, read_only_root_filesystem=True, capabilities=CapabilitiesArgs(drop=["ALL"])
                    ),
                    ports=ports,
                    volume_mounts=[VolumeMountArgs(name=n, mount_path=path, read_only=n == "config" or None) for n, path in mounts.items()],
                )
            ],
        ),
    )


def shared_memory(limit: str) -> str:
    """Return the size of /dev/shm: half of the memory limit, which it counts against.

    A checkpoint is copied there before it is uploaded, one copy of weights and optimizer state. The training itself needs the other half.
    """
    return memory_text(memory_bytes(limit) // 2)


def environment(where: Surroundings) -> list[EnvVarArgs]:
    """Return the environment of the trainer."""
    plain = {
        "AWS_ENDPOINT_URL": where.endpoint,
        "AWS_REGION": where.region,
        "TRAINYARD_IMAGE": where.image,
        "TRAINYARD_GIT_SHA": where.git_sha,
    }
    secret = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if where.credentials_secret else ()
    fields = {"TRAINYARD_POD": "metadata.name", "TRAINYARD_NODE": "spec.nodeName"}
    return [
        *(EnvVarArgs(name=name, value=value) for name, value in plain.items() if value is not None),
        *(EnvVarArgs(name=name, value_from=_from_secret(where.credentials_secret or "", name)) for name in secret),
        *(
            EnvVarArgs(name=n, value_from=EnvVarSourceArgs(field_ref=ObjectFieldSelectorArgs(field_path=path)))
            for n, path in fields.items()
        ),
    ]


def _from_secret(secret: str, key: str) -> EnvVarSourceArgs:
    return EnvVarSourceArgs(secret_key_ref=SecretKeySelectorArgs(name=secret, key=key))
