import pytest

from local.view.cluster import assemble
from local.view.ledger import Ledger
from local.view.waiting import Stage, decide, exit_code, meaning, notable, stage_of

from .objects import ADMITTED, attempt, condition, job, line, pod, run, warning, workload

FEW = "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu in flavor local, 2 more needed"
NEVER = "couldn't assign flavors to pod set main: insufficient quota for nvidia.com/gpu in flavor local, request > maximum capacity (8 > 2)"
CAPPED = 'pods "smoke-x" is forbidden: exceeded quota: team, requested: limits.memory=6Gi, used: 0, limited: 4Gi'
PENDING = workload(condition("QuotaReserved", "False", message=FEW, reason="Pending"))


def waiting(reason, message=""):
    return pod("Pending", state={"waiting": {"reason": reason, "message": message}})


@pytest.mark.parametrize(
    ("objects", "name", "words"),
    [
        pytest.param(run(job(suspend=True)), "submitted", ["Kueue has not taken the Job up yet"], id="no workload yet"),
        pytest.param(run(job(suspend=True), PENDING), "queued", ["in queue research", FEW], id="waits for quota"),
        pytest.param(
            run(job(suspend=True), workload(condition("QuotaReserved", "False", message=NEVER))),
            "queued",
            ["more than the queue can ever have", "run file"],
            id="never fits",
        ),
        pytest.param(
            run(job(suspend=True), workload(condition("QuotaReserved", "False", message="LocalQueue research doesn't exist"))),
            "queued",
            ["LocalQueue research doesn't exist"],
            id="no queue",
        ),
        pytest.param(
            run(
                job(suspend=True),
                workload(
                    condition("Evicted", message="Preempted to accommodate a workload"), condition("QuotaReserved", "False", message=FEW)
                ),
            ),
            "queued",
            ["evicted (Preempted to accommodate a workload)", FEW],
            id="preempted, queued again",
        ),
        pytest.param(
            run(
                job(suspend=True), workload(condition("QuotaReserved"), checks=[{"name": "budget", "state": "Pending", "message": "asks"}])
            ),
            "queued",
            ["check budget: asks"],
            id="admission check",
        ),
        pytest.param(run(job(suspend=True), ADMITTED, [pod(deleted=9)]), "stopping", ["saves and ends"], id="suspended, pod still saves"),
        pytest.param(
            run(job(suspend=True), workload(condition("Evicted", message="exceeded the maximum execution time"), active=False)),
            "deactivated",
            ["exceeded the maximum execution time"],
            id="deactivated",
        ),
        pytest.param(run(job(), ADMITTED), "admitted", ["pod is being made"], id="admitted"),
        pytest.param(
            run(job(), ADMITTED, [], [warning("job-1", CAPPED, "FailedCreate", kind="Job")]), "stuck", ["exceeded quota: team"], id="quota"
        ),
        pytest.param(
            run(
                job(),
                ADMITTED,
                [pod("Pending", condition("PodScheduled", "False", message="0/1 nodes are available: 1 Insufficient cpu."))],
            ),
            "unschedulable",
            ["no node takes the pod", "Insufficient cpu"],
            id="unschedulable",
        ),
        pytest.param(
            run(job(), ADMITTED, [waiting("ImagePullBackOff", "Back-off pulling image")]),
            "image",
            ["cannot be pulled", "localhost/trainer@sha256:feed", "Back-off"],
            id="image",
        ),
        pytest.param(
            run(job(), ADMITTED, [waiting("CreateContainerConfigError", 'secret "object-store" not found')]),
            "stuck",
            ["cannot be configured", "object-store"],
            id="secret missing",
        ),
        pytest.param(run(job(), ADMITTED, [waiting("ContainerCreating")]), "creating", ["local"], id="creating"),
        pytest.param(
            run(job(), ADMITTED, [waiting("ContainerCreating")], [warning("pod-1", "MountVolume.SetUp failed", "FailedMount")]),
            "creating",
            ["MountVolume.SetUp failed"],
            id="mount",
        ),
        pytest.param(run(job(), ADMITTED, [pod()]), "running", [], id="running"),
        pytest.param(run(job(), ADMITTED, [pod(deleted=60)]), "stopping", ["saves and ends"], id="stopping"),
        pytest.param(
            run(job(), ADMITTED, [pod("Failed", state={"terminated": {"exitCode": 42}})]),
            "admitted",
            ["exit code 42", "resumes"],
            id="restart",
        ),
        pytest.param(run(job(condition("Complete")), ADMITTED, [pod("Succeeded")]), "completed", [], id="completed"),
        pytest.param(
            run(job(condition("Failed", message="failed with exit code 44 matching FailJob rule")), ADMITTED),
            "failed",
            ["exit code 44"],
            id="failed",
        ),
    ],
)
def test_why_a_run_waits(objects, name, words):
    stage = stage_of(objects)
    assert stage.name == name
    assert [word for word in words if word not in stage.reason] == []


def test_a_run_that_waits_in_the_queue_says_more_than_the_one_that_trains():
    assert stage_of(run(job(), ADMITTED, [pod()])).reason == ""


@pytest.mark.parametrize(
    ("code", "word"),
    [(0, "done"), (42, "saved"), (44, "configuration"), (45, "data"), (47, "checkpoints"), (137, "memory"), (9, "not one")],
)
def test_exit_codes_have_a_meaning(code, word):
    ended = pod("Failed", state={"terminated": {"exitCode": code}})
    assert exit_code(run(job(), ADMITTED, [ended])) == code
    assert word in meaning(code)


def test_a_pod_that_runs_has_no_exit_code():
    assert exit_code(run(job(), ADMITTED, [pod()])) is None
    assert meaning(None) == ""


def test_the_newest_job_of_a_run_counts():
    from local.view.cluster import assemble

    old, new = job(condition("Failed"), uid="job-0", created=-900, name="smoke-old"), job()
    (entry,) = assemble([new, old], [ADMITTED], [pod()], [warning("job-0", "old news", "BackoffLimitExceeded")])
    assert (entry.job["metadata"]["name"], len(entry.pods), entry.workload, entry.events) == ("smoke-1a2b3c", 1, ADMITTED, [])


def test_preparation_comes_first_and_its_failure_ends_the_run():
    training, packing = run(job(suspend=True), PENDING), run(job(role="prepare", uid="job-1"), ADMITTED, [pod()])
    assert decide({"train": training, "prepare": packing}, Ledger()) == (Stage("running"), packing)
    packed = run(job(condition("Complete"), role="prepare"))
    assert decide({"train": training, "prepare": packed}, Ledger())[0].name == "queued"
    broken = run(job(condition("Failed", message="BackoffLimitExceeded"), role="prepare"))
    assert decide({"prepare": broken}, Ledger())[0].ended


def test_a_finished_run_whose_job_is_gone_is_known_from_its_ledger():
    ledger = Ledger.merge([*attempt(1, 0, [10]), line("done", 50, step=10, loss=1.0, seconds=40.0)])
    assert decide({}, ledger) == (Stage("completed"), None)
    assert not decide({}, Ledger())[0].ended


def test_warnings_and_evictions_matter_and_the_rest_does_not():
    kept = [warning("a", "w"), warning("a", "e", "EvictedDueToPreempted", type_="Normal"), warning("a", "p", "Preempted", type_="Normal")]
    assert notable([*kept, warning("a", "Created pod", "SuccessfulCreate", type_="Normal")]) == kept


def test_a_drill_of_a_run_is_not_the_run():
    drill = job(role="drill", uid="job-2", created=50, name="smoke-drill-1")
    assert [entry.role for entry in assemble([job(), drill], [], [pod()], [])] == ["train"]
