from local.view.follow import success
from local.view.ledger import Ledger
from local.view.status import drill_table, event_table, queue_table, run_table
from local.view.store import Store

from .objects import ADMITTED, T0, attempt, checkpoint, condition, job, line, pod, run, warning, workload

QUEUE = {
    "metadata": {"name": "research"},
    "spec": {
        "resourceGroups": [
            {
                "coveredResources": ["cpu", "memory", "nvidia.com/gpu"],
                "flavors": [
                    {
                        "name": "local",
                        "resources": [
                            {"name": "cpu", "nominalQuota": "1500m"},
                            {"name": "memory", "nominalQuota": "12Gi"},
                            {"name": "nvidia.com/gpu", "nominalQuota": "2"},
                        ],
                    }
                ],
            }
        ]
    },
    "status": {
        "pendingWorkloads": 3,
        "admittedWorkloads": 1,
        "flavorsUsage": [{"name": "local", "resources": [{"name": "nvidia.com/gpu", "total": "2"}, {"name": "memory", "total": "3Gi"}]}],
    },
}


def words(lines):
    return [row.split() for row in lines]


def test_a_queue_shows_quota_use_and_how_many_wait():
    assert words(queue_table([QUEUE])) == [
        ["queue", "flavor", "resource", "quota", "used", "running", "pending"],
        ["research", "local", "cpu", "1.5", "0", "1", "3"],
        ["local", "memory", "12.0", "GiB", "3.0", "GiB"],
        ["local", "nvidia.com/gpu", "2", "2"],
    ]


def test_a_queue_that_kueue_has_not_looked_at_yet_has_no_use():
    assert words(queue_table([{**QUEUE, "status": {}}]))[1] == ["research", "local", "cpu", "1.5", "0", "0", "0"]


def test_without_queues_there_is_no_table():
    assert queue_table([]) == []


def test_without_a_run_the_next_step_is_named():
    assert run_table({}, {}, T0) == ["no run is deployed; make up"]


def test_a_run_shows_state_step_loss_checkpoints_and_age():
    ledger = Ledger.merge([*attempt(1, 10, [50, 100]), checkpoint(50, 17)])
    rows = run_table({"smoke": {"train": run(job(), ADMITTED, [pod()])}}, {"smoke": ledger}, T0 + 125)
    assert words(rows)[0] == ["run", "namespace", "state", "step", "loss", "checkpoints", "good", "goodput", "age"]
    assert words(rows)[1] == ["smoke", "team-research", "training", "100/300", "4.000", "1", "-", "-", "2m05s"]
    assert len(rows) == 2


def test_a_run_shows_its_last_good_checkpoint_and_its_goodput():
    proved = [line("good", 18, step=50, loss=4.5, reproduced=4.5), line("goodput", 19, seconds={"start": 4.0, "step": 6.0}, wall=10.0)]
    ledger = Ledger.merge([*attempt(1, 10, [50, 100]), checkpoint(50, 17), checkpoint(100, 20), *proved])
    rows = run_table({"smoke": {"train": run(job(), ADMITTED, [pod()])}}, {"smoke": ledger}, T0 + 125)
    assert words(rows)[1][5:8] == ["2", "50", "60%"]


def test_a_run_that_waits_or_failed_says_why_below_the_table():
    queued = run(job(suspend=True), workload(condition("QuotaReserved", "False", message="2 more needed")))
    assert run_table({"smoke": {"train": queued}}, {"smoke": Ledger()}, T0)[-1] == "  smoke: in queue research: 2 more needed"
    failed = run(job(condition("Failed", message="backoff limit")), ADMITTED)
    ledger = Ledger.merge([*attempt(1, 0, []), line("error", 5, code=45, message="no shards in datasets/x")])
    assert run_table({"smoke": {"train": failed}}, {"smoke": ledger}, T0)[-1] == "  smoke: no shards in datasets/x"


def test_the_newest_drills_say_how_they_ended():
    drills = [
        job(condition("Complete"), role="drill", name="old"),
        job(condition("Complete"), role="drill", name="smoke-drill-1", created=10),
        job(condition("Failed"), role="drill", name="smoke-drill-2", created=20),
        job(role="drill", name="smoke-drill-3", suspend=True, created=65),
    ]
    assert words(drill_table(drills, T0 + 70))[1:] == [
        ["smoke", "team-research", "smoke-drill-1", "passed", "1m00s"],
        ["smoke", "team-research", "smoke-drill-2", "failed", "50.0s"],
        ["smoke", "team-research", "smoke-drill-3", "queued", "5.0s"],
    ]
    assert "running" in drill_table([job(role="drill")], T0 + 70)[1]
    assert drill_table([], T0) == []


def test_only_the_newest_events_that_matter_are_listed():
    events = [warning("pod-1", f"trouble {i}", seconds=i) for i in range(20)]
    calm = warning("pod-1", "Started container", "Started", type_="Normal")
    lines = event_table([run(job(), ADMITTED, [pod()], [*events, calm])], T0 + 30)
    assert len(lines) == 9
    assert lines[-1].endswith("trouble 19")
    assert "Started container" not in "\n".join(lines)


def test_a_completed_run_ends_with_its_curve_its_loss_and_where_the_checkpoints_are():
    lines = [*attempt(1, 0, range(5, 305, 5)), checkpoint(300, 70), line("done", 80, step=300, loss=1.5, seconds=80.0)]
    told = success(
        "smoke",
        Ledger.merge(lines),
        Store("http://198.18.0.2:7070", "us-east-1"),
        {"width": 60, "height": 8, "unicode": False, "colour": False},
    )
    assert told[1] == "loss, nats per byte"
    assert "The run smoke is complete: 300 steps, final loss 1.500, 1m20s." in told
    assert told[-1] == "  checkpoints:  s3://trainyard-local/runs/smoke/checkpoints/ (1 written, the last 24.8 MiB)"


def test_a_completed_run_accounts_for_its_time_and_names_what_was_proved():
    lines = [*attempt(1, 0, [100]), checkpoint(100, 20), line("evaluate", 21, step=100, loss=2.25, seconds=0.1)]
    lines += [line("goodput", 29, seconds={"start": 5.0, "step": 15.0}, wall=20.0), line("done", 30, step=100, loss=1.5, seconds=30.0)]
    lines.append(line("good", 31, step=100, loss=2.25, reproduced=2.25))
    room = {"width": 60, "height": 8, "unicode": False, "colour": False}
    told = success("smoke", Ledger.merge(lines), Store(None, "us-east-1"), room)
    assert "The run smoke is complete: 100 steps, final loss 1.500, validation loss 2.250, 30.0s." in told
    rows = [row.split()[:3] for row in told[told.index("  where the time went:") + 1 : -1]]
    assert rows == [["start", "5.0s", "25.0%"], ["step", "15.0s", "75.0%"], ["in", "all", "20.0s"]]
    assert told[-1].endswith("(1 written, the last 24.8 MiB, loaded back and proved: 100)")


def test_the_store_comes_from_the_platforms_facts():
    facts = {"objectStore": {"endpoint": "http://198.18.0.2:7070", "region": "eu-west-1"}}
    assert Store.of(facts, "mine") == Store("http://198.18.0.2:7070", "eu-west-1", "mine")
    assert Store.of({}).endpoint is None
