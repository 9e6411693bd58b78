"""A run on the real node: queued, admitted, scheduled with its GPUs, trained in a restricted pod; and interrupted without a trace."""

from __future__ import annotations

import pytest

from local.node.probe import kubectl
from tests import live
from tests.conftest import Until

pytestmark = pytest.mark.timeout(1500)
"""The fixture waits for three runs, one after the other."""

STRAIGHT, INTERRUPTED = "straight", "interrupted"
FILES = tuple(f"tests/cluster/runs/{name}.yaml" for name in (STRAIGHT, INTERRUPTED))


@pytest.fixture(scope="module")
def finished(until: Until) -> None:
    """Deploy both runs, delete the pod of one while it trains, wait for both to complete; they have the two GPUs one after the other."""
    live.forget(STRAIGHT, INTERRUPTED)
    live.deploy(*FILES)
    deleted = until("a step past the first checkpoint of the run to interrupt", _past_the_first_checkpoint, 600)
    kubectl("delete", "pod", deleted, f"--namespace={live.NAMESPACE}", "--wait=false")
    for run in (STRAIGHT, INTERRUPTED):
        until(f"the end of run {run}", lambda run=run: live.conditions(live.of_run("jobs.batch", run)[-1]).get("Complete") == "True", 600)


def _past_the_first_checkpoint() -> str:
    for pod in live.of_run("pods", INTERRUPTED):
        name = pod["metadata"]["name"]
        if pod["status"]["phase"] == "Running" and '"step": 25' in live.log(name).replace('"step":25', '"step": 25'):
            return name
    return ""


def test_the_job_was_created_suspended_and_admitted_by_kueue(finished: None) -> None:
    workload = live.workload(STRAIGHT)
    assert live.conditions(workload)["Admitted"] == "True"
    assert workload["status"]["admission"]["clusterQueue"] == "research"
    flavors = workload["status"]["admission"]["podSetAssignments"][0]["flavors"]
    assert flavors["nvidia.com/gpu"] == "local"


def test_it_had_its_gpus_and_no_right_that_it_does_not_need(finished: None) -> None:
    pod = live.of_run("pods", STRAIGHT)[-1]
    container = pod["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert pod["spec"].get("automountServiceAccountToken") is False
    assert "@sha256:" in container["image"]


def test_the_loss_falls(finished: None) -> None:
    curve = live.ledger(STRAIGHT).series("loss")
    assert curve[0].value > 5
    assert curve[-1].value < 3.5


def test_the_interrupted_run_began_again_from_a_checkpoint(finished: None) -> None:
    told = live.ledger(INTERRUPTED)
    assert [attempt.outcome for attempt in told.attempts] == ["evicted", "completed"]
    restored = told.last("restore")
    assert restored
    assert restored.integer("step") >= 20


def test_its_losses_equal_those_of_the_run_that_was_left_alone_bit_for_bit(finished: None) -> None:
    straight = live.ledger(STRAIGHT).series("loss")
    assert straight == live.ledger(INTERRUPTED).series("loss")
    assert [point.step for point in straight] == list(range(1, 61))
