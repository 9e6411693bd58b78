"""The arithmetic of shares: node groups and teams into quotas. Every number that limits something comes from here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from infra.labels import GPU
from infra.problems import Problem
from infra.quantities import cpu_text, memory_bytes, memory_text, millicpu
from infra.runs.file import RunFile
from infra.settings import NodeGroup, PlatformConfig, Team

_PREFIX = "trainyard:"


@dataclass(frozen=True)
class Amount:
    """Resources as whole numbers: GPUs, thousandths of a CPU, bytes."""

    gpus: int = 0
    cpu: int = 0
    memory: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.gpus + other.gpus, self.cpu + other.cpu, self.memory + other.memory)

    def covers(self, other: Amount) -> bool:
        """Return whether `other` fits in this."""
        return self.gpus >= other.gpus and self.cpu >= other.cpu and self.memory >= other.memory

    def resources(self) -> dict[str, str]:
        """Return the amounts as Kubernetes names and writes them."""
        return {"cpu": cpu_text(self.cpu), "memory": memory_text(self.memory), GPU: str(self.gpus)}

    def __str__(self) -> str:
        return f"{self.gpus} GPUs, {cpu_text(self.cpu)} CPU, {memory_text(self.memory)} memory"


@dataclass(frozen=True)
class FlavorQuota:
    """What a team may use of one node group: guaranteed, and borrowed on top."""

    group: str
    nominal: Amount
    borrowing: Amount

    @property
    def most(self) -> Amount:
        """The most Kueue may admit of the team on this group."""
        return self.nominal + self.borrowing


@dataclass(frozen=True)
class TeamQuota:
    """The quotas of a team over the node groups, in order of preference."""

    team: str
    flavors: tuple[FlavorQuota, ...]

    @property
    def admissible(self) -> Amount:
        """The most Kueue may admit of the team at once."""
        return sum((flavor.most for flavor in self.flavors), Amount())

    @property
    def namespace_limit(self) -> Amount:
        """The ResourceQuota of the namespace.

        Kueue gives quota away again while the evicted pods still terminate, so two generations can exist at once.
        A limit below that would refuse pods Kueue has admitted, and the run would wait for ever.
        """
        return self.admissible + self.admissible


def team_quotas(config: PlatformConfig) -> tuple[TeamQuota, ...]:
    """Return the quotas of every team."""
    return tuple(_team_quota(config, team) for team in config.teams)


def _team_quota(config: PlatformConfig, team: Team) -> TeamQuota:
    flavors = (FlavorQuota(g.name, share(g, team.gpus.get(g.name, 0)), share(g, team.borrow.get(g.name, 0))) for g in config.node_groups)
    return TeamQuota(team.name, tuple(flavors))


def share(group: NodeGroup, gpus: int) -> Amount:
    """Return the part of a node group that belongs to some of its GPUs: CPU and memory in proportion, rounded down."""
    shape = group.node
    return Amount(gpus, millicpu(shape.cpu) * gpus // shape.gpus, memory_bytes(shape.memory) * gpus // shape.gpus)


def one_node(group: NodeGroup) -> Amount:
    """Return what one node of a group offers to runs."""
    return share(group, group.node.gpus)


def request(run: RunFile, gpus: int | None = None) -> Amount:
    """Return what a run asks of its node; its drill asks the same with another number of GPUs."""
    return Amount(gpus or run.resources.gpus_per_node, millicpu(run.resources.cpu), memory_bytes(run.resources.memory))


def share_problems(config: PlatformConfig, file: str) -> Iterable[Problem]:
    """Find the shares that cannot hold: both sides of the inequality and the key to change."""
    for position, group in enumerate(config.node_groups):
        total = group.nodes.max * group.node.gpus
        offers = f"{group.nodes.max} x {group.node.gpus} = {total}"
        guaranteed = {team.name: team.gpus.get(group.name, 0) for team in config.teams}
        if sum(guaranteed.values()) > total:
            terms = " + ".join(f"{name} {gpus}" for name, gpus in guaranteed.items() if gpus)
            wrong = (
                f"guaranteed GPUs <= GPUs of the group does not hold for {group.name!r}: {terms} = {sum(guaranteed.values())} > {offers}"
            )
            remedy = f"raise {_PREFIX}nodeGroups[{position}].nodes.max or lower a team's gpus.{group.name}"
            yield Problem(file, f"{_PREFIX}teams", wrong, allowed=remedy)
        for index, team in enumerate(config.teams):
            own, borrowed = team.gpus.get(group.name, 0), team.borrow.get(group.name, 0)
            if borrowed and own + borrowed > total:
                wrong = (
                    f"gpus + borrow <= GPUs of the group does not hold for {group.name!r}: {own} + {borrowed} = {own + borrowed} > {offers}"
                )
                yield Problem(file, f"{_PREFIX}teams[{index}].borrow.{group.name}", wrong, allowed=f"at most {max(total - own, 0)}")


def run_problems(config: PlatformConfig, runs: Mapping[str, RunFile]) -> Iterable[Problem]:
    """Find the runs that could never be admitted, or would wait for a node that does not exist. `runs` is file -> run."""
    quotas = {quota.team: quota for quota in team_quotas(config)}
    for file, run in runs.items():
        quota = quotas.get(run.team)
        if quota is None:
            yield Problem(
                file, "team", f"{run.team!r} is not a team of this stack", allowed=", ".join(quotas), paste=f"team: {next(iter(quotas))}\n"
            )
            continue
        if run.priority not in config.priorities:
            first = next(iter(config.priorities))
            yield Problem(
                file, "priority", f"{run.priority!r} is not a priority of this stack", ", ".join(config.priorities), f"priority: {first}\n"
            )
        asked = {"resources": request(run)} | ({"drill.world_size": request(run, run.drill.world_size)} if run.drill else {})
        for key, need in asked.items():
            if not any(flavor.most.covers(need) and one_node(config.group(flavor.group)).covers(need) for flavor in quota.flavors):
                choices = "; ".join(
                    f"{f.group}: team may use {f.most}, one node offers {one_node(config.group(f.group))}" for f in quota.flavors
                )
                wrong = f"request <= share of the team and <= one node does not hold in any node group: asks {need}"
                remedy = f"{choices}; lower {key}, or raise {_PREFIX}teams or {_PREFIX}nodeGroups of the stack"
                yield Problem(file, key, wrong, allowed=remedy)
                break
