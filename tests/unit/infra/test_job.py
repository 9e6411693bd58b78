"""A run file becomes Jobs that may do nothing but train. Pure: no engine, no mocks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra import labels
from infra.quantities import memory_bytes
from infra.runs import drill, job
from infra.runs.file import RunFile, load_run
from training import errors
from training.config import RunConfig, load

PROJECT = Path(__file__).parents[3]
IMAGE = f"registry.example.com/trainer@sha256:{'a' * 64}"
WHERE = job.Surroundings(
    image=IMAGE, git_sha="abc1234", bucket="bucket-1", region="us-east-1", endpoint="http://store:1", credentials_secret=labels.STORE_SECRET
)
RUN = load_run(PROJECT / "runs" / "smoke.yaml", "smoke.yaml")

Plain = Callable[[Any], Any]


@pytest.fixture
def training(plain: Plain) -> dict[str, Any]:
    return plain(job.training_spec(RUN, WHERE, "config-1"))


@pytest.fixture
def preparation(plain: Plain) -> dict[str, Any]:
    return plain(job.preparation_spec(RUN, WHERE, "config-1"))


@pytest.fixture
def rehearsal(plain: Plain) -> dict[str, Any]:
    """The Job of a drill, in the form of the other two."""
    assert RUN.drill
    return plain(drill.spec(RUN, RUN.drill, WHERE, "config-1"))["job_template"]["spec"]


def container(spec: dict[str, Any]) -> dict[str, Any]:
    (one,) = spec["template"]["spec"]["containers"]
    return one


@pytest.mark.parametrize("which", ["training", "preparation", "rehearsal"])
def test_pods_fit_the_restricted_pod_security_level(which: str, request: pytest.FixtureRequest) -> None:
    spec = request.getfixturevalue(which)
    pod = spec["template"]["spec"]
    assert pod["security_context"]["run_as_non_root"] is True
    assert pod["security_context"]["run_as_user"] > 0
    assert pod["security_context"]["seccomp_profile"] == {"type": "RuntimeDefault"}
    assert pod["automount_service_account_token"] is False
    assert container(spec)["security_context"] == {
        "allow_privilege_escalation": False,
        "read_only_root_filesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"host_network", "host_pid", "host_ipc"} & {name for name, value in pod.items() if value}
    assert all({"config_map", "empty_dir"} & set(volume) for volume in pod["volumes"])


def test_gpus_are_asked_for_and_limited_alike(training: dict[str, Any], preparation: dict[str, Any]) -> None:
    resources = container(training)["resources"]
    assert resources == {
        "requests": {"cpu": RUN.resources.cpu, "memory": RUN.resources.memory, labels.GPU: "2"},
        "limits": {"memory": RUN.resources.limit, labels.GPU: "2"},
    }
    assert labels.GPU not in {**container(preparation)["resources"]["requests"], **container(preparation)["resources"]["limits"]}


def test_the_ways_a_pod_can_end_are_told_apart(training: dict[str, Any], preparation: dict[str, Any]) -> None:
    disruption, evicted, hopeless = training["pod_failure_policy"]["rules"]
    assert (disruption["action"], disruption["on_pod_conditions"]) == ("Ignore", [{"type": "DisruptionTarget", "status": "True"}])
    assert (evicted["action"], evicted["on_exit_codes"]["values"]) == ("Ignore", [42, 43])
    assert (hopeless["action"], hopeless["on_exit_codes"]["values"]) == ("FailJob", [44, 45, 47, 48])
    names = {rule["on_exit_codes"]["container_name"] for rule in (evicted, hopeless)}
    assert names == {container(training)["name"]}
    assert "pod_failure_policy" not in preparation


def test_the_codes_are_those_of_the_trainer() -> None:
    assert job.EVICTED == (errors.EVICTED_SAVED, errors.EVICTED_UNSAVED)
    assert job.HOPELESS == (errors.CONFIGURATION, errors.DATA, errors.NO_USABLE_CHECKPOINT, errors.SUPERSEDED)
    # What may be gone with the next attempt has no rule: it counts.
    assert not {errors.UNEXPECTED, errors.PREFLIGHT, errors.HUNG} & {*job.EVICTED, *job.HOPELESS}


@pytest.mark.parametrize("which", ["training", "preparation", "rehearsal"])
def test_jobs_wait_for_the_queue_and_stay_when_they_have_ended(which: str, request: pytest.FixtureRequest) -> None:
    spec = request.getfixturevalue(which)
    assert spec["suspend"] is True
    # A Job that vanished by itself would be made, and run, again by the next `pulumi up`.
    assert "ttl_seconds_after_finished" not in spec
    assert spec["template"]["spec"]["restart_policy"] == "Never"
    assert spec["template"]["spec"]["priority_class_name"] == labels.TRAINING_PRIORITY_CLASS


def test_the_grace_of_the_run_is_that_of_its_pod_and_of_the_trainer(training: dict[str, Any]) -> None:
    assert training["template"]["spec"]["termination_grace_period_seconds"] == RUN.grace_seconds
    assert job.trainer_config(RUN, "b")["grace_seconds"] == RUN.grace_seconds
    assert (training["backoff_limit"], training["pod_replacement_policy"]) == (job.RETRIES, "Failed")


def test_jobs_and_pods_carry_the_labels_of_the_run_and_name_their_queue(plain: Plain, training: dict[str, Any]) -> None:
    own = labels.of_run("smoke", "research", "train")
    assert training["template"]["metadata"]["labels"] == own
    metadata = plain(job.training_metadata(RUN))
    assert metadata["namespace"] == "team-research"
    assert metadata["labels"] == own | {
        "kueue.x-k8s.io/queue-name": "research",
        "kueue.x-k8s.io/priority-class": "standard",
        "kueue.x-k8s.io/max-exec-time-seconds": "3600",
    }
    assert "name" not in metadata
    assert plain(job.preparation_metadata(RUN))["labels"][labels.ROLE] == "prepare"
    pattern = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
    assert all(pattern.fullmatch(value) for value in metadata["labels"].values())


def test_the_image_is_the_one_given_and_recorded(training: dict[str, Any]) -> None:
    assert container(training)["image"] == IMAGE
    assert {"name": "TRAINYARD_IMAGE", "value": IMAGE} in container(training)["env"]
    assert {"name": "TRAINYARD_GIT_SHA", "value": "abc1234"} in container(training)["env"]


def test_keys_of_the_store_come_from_the_secret_only(training: dict[str, Any]) -> None:
    found = {entry["name"]: entry for entry in container(training)["env"]}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert found[name] == {"name": name, "value_from": {"secret_key_ref": {"name": "object-store", "key": name}}}


def test_without_a_secret_and_an_endpoint_the_environment_names_neither(plain: Plain) -> None:
    names = {entry["name"] for entry in plain(job.environment(job.Surroundings(IMAGE, "abc1234", "bucket-1", "eu-west-1")))}
    assert names == {"AWS_REGION", "TRAINYARD_IMAGE", "TRAINYARD_GIT_SHA", "TRAINYARD_POD", "TRAINYARD_NODE"}


def test_shared_memory_is_half_of_the_limit_it_counts_against(training: dict[str, Any]) -> None:
    shm = next(volume for volume in training["template"]["spec"]["volumes"] if volume["name"] == "shm")
    assert shm["empty_dir"] == {"medium": "Memory", "size_limit": "3Gi"}
    assert [job.shared_memory(limit) for limit in ("4Gi", "1Gi")] == ["2Gi", "512Mi"]


def test_the_scratch_space_holds_the_cached_shards(plain: Plain) -> None:
    larger = RUN.model_copy(update={"data": RUN.data.model_copy(update={"cache_bytes": 10 * 2**30})})
    sizes = []
    for run in (RUN, larger):
        volumes = plain(job.training_spec(run, WHERE, "config-1"))["template"]["spec"]["volumes"]
        sizes.append(next(volume for volume in volumes if volume["name"] == "tmp")["empty_dir"]["size_limit"])
        assert job.trainer_config(run, "b")["data"]["cache_bytes"] < memory_bytes(sizes[-1])
    assert sizes == ["2Gi", "11Gi"]


def test_the_endpoint_of_metrics_is_a_named_port_when_there_is_one(plain: Plain, training: dict[str, Any]) -> None:
    assert container(training)["ports"] == [{"name": "metrics", "container_port": 9400}]
    silent = RUN.model_copy(update={"metrics": None})
    assert not container(plain(job.training_spec(silent, WHERE, "config-1"))).get("ports")


def test_a_claim_is_mounted_where_checkpoints_go_and_the_preparation_leaves_it_alone(plain: Plain) -> None:
    checkpoint = RUN.checkpoint.model_copy(update={"folder": "/mnt/c", "claim": "ours"})
    run = RUN.model_copy(update={"checkpoint": checkpoint})
    spec = plain(job.training_spec(run, WHERE, "config-1"))
    assert {"name": "checkpoints", "persistent_volume_claim": {"claim_name": "ours"}} in spec["template"]["spec"]["volumes"]
    assert {"name": "checkpoints", "mount_path": "/mnt/c"} in container(spec)["volume_mounts"]
    config = job.trainer_config(run, "b")["checkpoint"]
    assert (config["folder"], "claim" in config) == ("/mnt/c", False)
    assert "checkpoints" not in json.dumps(plain(job.preparation_spec(run, WHERE, "config-1")))


def test_packed_shards_are_read_where_they_lie() -> None:
    packed = RUN.model_copy(update={"data": RUN.data.model_copy(update={"source": "s3://other/books/v1/"})})
    assert packed.data.packed
    data = job.trainer_config(packed, "bucket-1")["data"]
    assert (data["bucket"], data["prefix"]) == ("other", "books/v1")
    own = job.trainer_config(RUN, "bucket-1")["data"]
    assert ("bucket" not in own, own["prefix"]) == (True, f"datasets/{RUN.data.name}")


def understood(run: RunFile, folder: Path) -> RunConfig:
    (folder / "run.json").write_text(json.dumps(job.trainer_config(run, "bucket-1")))
    return load(folder / "run.json")


def test_the_trainer_understands_the_configuration_it_is_given(tmp_path: Path) -> None:
    config = understood(RUN, tmp_path)
    assert (config.run, config.processes, config.nodes) == (RUN.name, RUN.resources.gpus_per_node, 1)
    for ours, theirs in ((RUN.train, config.train), (RUN.checkpoint, config.checkpoint), (RUN.mesh, config.mesh), (RUN.data, config.data)):
        assert ours
        given = ours.model_dump(exclude_none=True)
        assert given.items() <= theirs.model_dump().items()


def test_what_a_run_file_leaves_open_is_left_to_the_trainer(tmp_path: Path) -> None:
    keys = ("mesh", "eviction", "preflight", "metrics", "drill", "hang_seconds")
    small = RUN.model_copy(update=dict.fromkeys(keys))
    assert not set(keys) & set(job.trainer_config(small, "b"))
    assert None not in job.trainer_config(small, "b")["train"].values()
    assert understood(small, tmp_path).hang_seconds == RunConfig.model_fields["hang_seconds"].default


def test_every_part_of_a_run_file_reaches_the_trainer(tmp_path: Path) -> None:
    keys = {
        "mesh": {"shard": 2, "zero": 2},
        "eviction": {"metadata_service": True, "poll_seconds": 2},
        "preflight": {"enabled": False, "floor_gigabytes_per_second": 10, "megabytes": 8},
        "metrics": {"port": 9401},
        "hang_seconds": 60,
        "accept_changes": ["data", "tokenizer"],
    }
    config = understood(RunFile.model_validate({**RUN.model_dump(exclude_none=True), **keys}), tmp_path)
    assert (config.mesh.shard, config.mesh.zero, config.metrics.port) == (2, 2, 9401)
    assert (config.eviction.metadata_service, config.eviction.poll_seconds) == ("http://169.254.169.254", 2)
    assert (config.preflight.enabled, config.preflight.floor_gigabytes_per_second, config.preflight.megabytes) == (False, 10, 8)
    assert (config.hang_seconds, config.accept_changes) == (60, {"data", "tokenizer"})


def test_the_command_reads_the_mounted_file(training: dict[str, Any], preparation: dict[str, Any]) -> None:
    for spec, module in ((training, "training.launch"), (preparation, "training.prepare")):
        assert container(spec)["command"] == ["python", "-m", module, "--config", "/etc/trainyard/run.json"]
        mounts = {mount["name"]: mount["mount_path"] for mount in container(spec)["volume_mounts"]}
        assert mounts == {"config": "/etc/trainyard", "tmp": "/tmp", "shm": "/dev/shm"}


def test_a_drill_has_its_own_number_of_gpus_and_is_not_tried_again(rehearsal: dict[str, Any]) -> None:
    assert container(rehearsal)["resources"]["limits"] == {"memory": RUN.resources.limit, labels.GPU: "1"}
    assert (rehearsal["backoff_limit"], rehearsal["active_deadline_seconds"]) == (0, RUN.max_seconds)
    command = ["python", "-m", "training", "drill", "--world-size", "1", "--steps", "5", "--config", "/etc/trainyard/run.json"]
    assert container(rehearsal)["command"] == command


def test_drills_come_one_at_a_time_through_the_queue_and_leave_the_last_to_be_looked_at(plain: Plain) -> None:
    assert RUN.drill
    spec = plain(drill.spec(RUN, RUN.drill, WHERE, "config-1"))
    assert (spec["schedule"], spec["concurrency_policy"]) == ("0 4 1 * *", "Forbid")
    assert (spec["successful_jobs_history_limit"], spec["failed_jobs_history_limit"]) == (3, 3)
    assert spec["starting_deadline_seconds"] == drill.LATE_SECONDS
    own = labels.of_run("smoke", "research", "drill")
    queued = own | {"kueue.x-k8s.io/queue-name": "research", "kueue.x-k8s.io/priority-class": "standard"}
    assert spec["job_template"]["metadata"]["labels"] == queued
    # The CronJob itself is nothing that could be queued.
    assert plain(drill.metadata(RUN))["labels"] == own


def test_the_name_of_a_drill_leaves_room_for_what_the_controller_adds(plain: Plain) -> None:
    longest = RUN.model_copy(update={"name": "r" * 40})
    assert len(plain(drill.metadata(longest))["name"]) <= 52
