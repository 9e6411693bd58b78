"""The arithmetic of shares: whole numbers, both sides of what does not hold, and limits that never contradict each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.capacity import Amount, one_node, request, run_problems, share, share_problems, team_quotas
from infra.kubernetes.queues import cluster_queue_spec
from infra.quantities import memory_bytes, millicpu
from infra.runs.file import RunFile, load_run
from infra.settings import NodeGroup, PlatformConfig

PROJECT = Path(__file__).parents[3]
GIB = 2**30
RUN = load_run(PROJECT / "runs" / "smoke.yaml", "smoke.yaml")


def group(name: str, gpus: int = 4, nodes: int = 2, cpu: str = "44", memory: str = "170Gi") -> dict[str, Any]:
    return {"name": name, "node": {"gpus": gpus, "cpu": cpu, "memory": memory}, "nodes": {"min": 0, "max": nodes}}


def stack(groups: list[dict[str, Any]], teams: list[dict[str, Any]]) -> PlatformConfig:
    return PlatformConfig.model_validate(
        {
            "provider": "existing",
            "storage": {"bucket": "bucket-1"},
            "nodeGroups": groups,
            "teams": teams,
            "priorities": {"low": 10, "standard": 100},
        }
    )


def run(**resources: object) -> RunFile:
    return RUN.model_copy(update={"resources": RUN.resources.model_copy(update=resources)})


def test_cpu_and_memory_follow_the_gpus_rounded_down() -> None:
    odd = NodeGroup.model_validate(group("odd", gpus=3, cpu="1", memory="1Gi"))
    assert share(odd, 1) == Amount(1, 333, GIB // 3)
    assert share(odd, 0) == Amount()
    assert one_node(odd) == Amount(3, 1000, GIB)


def test_what_a_run_asks_for_is_counted_in_whole_numbers() -> None:
    assert request(run(gpus_per_node=2, cpu="1500m", memory="3Gi")) == Amount(2, 1500, 3 * GIB)


def test_shares_that_fit_are_no_problem() -> None:
    assert not list(share_problems(stack([group("l4")], [{"name": "a", "gpus": {"l4": 6}}, {"name": "b", "gpus": {"l4": 2}}]), "f"))


def test_guarantees_above_the_group_show_both_sides_and_the_keys_to_change() -> None:
    config = stack([group("h100"), group("l4")], [{"name": "a", "gpus": {"l4": 6}}, {"name": "b", "gpus": {"l4": 3}}])
    (problem,) = share_problems(config, "Pulumi.x.yaml")
    assert (problem.file, problem.key) == ("Pulumi.x.yaml", "trainyard:teams")
    assert "for 'l4': a 6 + b 3 = 9 > 2 x 4 = 8" in problem.wrong
    assert problem.allowed == "raise trainyard:nodeGroups[1].nodes.max or lower a team's gpus.l4"


def test_borrowing_above_the_group_shows_both_sides_and_the_most_there_is() -> None:
    (problem,) = share_problems(stack([group("l4")], [{"name": "a", "gpus": {"l4": 6}, "borrow": {"l4": 3}}]), "f")
    assert problem.key == "trainyard:teams[0].borrow.l4"
    assert "6 + 3 = 9 > 2 x 4 = 8" in problem.wrong
    assert problem.allowed == "at most 2"


def problem_of(config: PlatformConfig, one: RunFile) -> tuple[str, str, str]:
    (problem,) = run_problems(config, {"runs/x.yaml": one})
    assert problem.file == "runs/x.yaml"
    return problem.key, problem.wrong, problem.allowed


RESEARCH = [{"name": "research", "gpus": {"l4": 2}, "borrow": {"l4": 2}}]


def test_a_run_of_an_unknown_team_or_priority_is_told_which_there_are() -> None:
    config = stack([group("l4")], RESEARCH)
    assert problem_of(config, RUN.model_copy(update={"team": "ops"}))[::2] == ("team", "research")
    assert problem_of(config, RUN.model_copy(update={"priority": "now"}))[::2] == ("priority", "low, standard")


def test_a_run_may_use_what_its_team_has_and_may_borrow() -> None:
    config = stack([group("l4")], RESEARCH)
    assert not list(run_problems(config, {"x": run(gpus_per_node=4, cpu="44", memory="170Gi")}))


@pytest.mark.parametrize(
    ("shape", "resources"),
    [
        ({}, {"gpus_per_node": 5}),
        ({}, {"gpus_per_node": 2, "cpu": "45"}),
        ({}, {"gpus_per_node": 2, "memory": "171Gi"}),
        ({"gpus": 2, "nodes": 4}, {"gpus_per_node": 3}),
    ],
    ids=["gpus of the team", "cpu", "memory", "gpus of one node"],
)
def test_a_run_that_fits_nowhere_shows_both_sides_and_the_keys_to_change(shape: dict[str, Any], resources: dict[str, Any]) -> None:
    key, wrong, allowed = problem_of(stack([group("l4", **shape)], RESEARCH), run(**resources))
    assert key == "resources"
    assert f"asks {resources['gpus_per_node']} GPUs" in wrong
    assert "l4: team may use 4 GPUs" in allowed
    assert "one node offers" in allowed
    assert "trainyard:teams" in allowed
    assert "trainyard:nodeGroups" in allowed


def test_a_drill_that_fits_nowhere_is_told_when_its_training_fits() -> None:
    assert RUN.drill
    larger = RUN.model_copy(update={"drill": RUN.drill.model_copy(update={"world_size": 5})})
    key, wrong, allowed = problem_of(stack([group("l4")], RESEARCH), larger)
    assert (key, "asks 5 GPUs" in wrong, "lower drill.world_size" in allowed) == ("drill.world_size", True, True)
    assert not list(run_problems(stack([group("l4")], RESEARCH), {"x": RUN}))


def test_a_run_does_not_fit_by_adding_up_two_groups() -> None:
    teams = [{"name": "research", "gpus": {"l4": 2, "spot": 2}}]
    assert problem_of(stack([group("l4"), group("spot")], teams), run(gpus_per_node=4))[0] == "resources"


GROUPS = st.lists(
    st.builds(
        lambda gpus, nodes, cpu, memory: (gpus, nodes, cpu, memory),
        st.integers(1, 16),
        st.integers(1, 40),
        st.integers(1, 200_000).map(lambda milli: f"{milli}m"),
        st.integers(1, 2_000_000).map(lambda mib: f"{mib}Mi"),
    ),
    min_size=1,
    max_size=4,
)


@st.composite
def stacks_that_hold(draw: st.DrawFn) -> PlatformConfig:
    groups = [group(f"g{index}", *shape) for index, shape in enumerate(draw(GROUPS))]
    teams: list[dict[str, Any]] = [{"name": f"t{index}", "gpus": {}, "borrow": {}} for index in range(draw(st.integers(1, 4)))]
    for one in groups:
        total = left = one["node"]["gpus"] * one["nodes"]["max"]
        for team in teams:
            own = draw(st.integers(0, left))
            left -= own
            team["gpus"][one["name"]] = own
            team["borrow"][one["name"]] = draw(st.integers(0, total - own))
    return stack(groups, teams)


@settings(deadline=None, max_examples=60)
@given(stacks_that_hold())
def test_quotas_never_contradict_each_other(config: PlatformConfig) -> None:
    assert not list(share_problems(config, "f"))
    quotas = team_quotas(config)
    for position, one in enumerate(config.node_groups):
        # What is guaranteed exists.
        nominal = sum((quota.flavors[position].nominal for quota in quotas), Amount())
        node = Amount(one.node.gpus, millicpu(one.node.cpu), memory_bytes(one.node.memory))
        assert Amount(*(amount * one.nodes.max for amount in (node.gpus, node.cpu, node.memory))).covers(nominal)
    for quota in quotas:
        # What Kueue may admit, read back from the queue as it is written, is never refused by the namespace.
        admitted = {"cpu": 0, "memory": 0, "nvidia.com/gpu": 0}
        for flavor in cluster_queue_spec(quota)["resourceGroups"][0]["flavors"]:
            for resource in flavor["resources"]:
                for side in ("nominalQuota", "borrowingLimit"):
                    admitted[resource["name"]] += _number(resource["name"], resource[side])
        limit = quota.namespace_limit.resources()
        assert all(_number(name, limit[name]) >= amount for name, amount in admitted.items())


def _number(name: str, text: str) -> int:
    return {"cpu": millicpu, "memory": memory_bytes}.get(name, int)(text)
