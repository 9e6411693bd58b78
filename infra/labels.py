"""The names that several layers, the policies and the people at the terminal agree on."""

from __future__ import annotations

RUN = "trainyard.dev/run"
ROLE = "trainyard.dev/role"
TEAM = "trainyard.dev/team"
NODE_GROUP = "trainyard.dev/node-group"
MANAGED_BY = "app.kubernetes.io/managed-by"

GPU = "nvidia.com/gpu"

KUEUE_NAMESPACE = "kueue-system"
JOBSET_NAMESPACE = "jobset-system"
TRAINING_PRIORITY_CLASS = "trainyard-training"
TRAINER_SERVICE_ACCOUNT = "trainer"
STORE_SECRET = "object-store"  # noqa: S105 (the name of the Secret, not its content)
COHORT = "trainyard"
DRILL = "drill"
"""Role of the Jobs of a restore drill."""


def team_namespace(team: str) -> str:
    """Return the namespace of a team."""
    return f"team-{team}"


def managed(**extra: str) -> dict[str, str]:
    """Return the labels every object of the program carries, and `extra`."""
    return {MANAGED_BY: "pulumi", **extra}


def of_team(team: str) -> dict[str, str]:
    """Return the labels of an object that belongs to a team."""
    return managed(**{TEAM: team})


def of_run(run: str, team: str, role: str | None = None) -> dict[str, str]:
    """Return the labels of an object of a run; `role` is `train`, `prepare` or `drill`."""
    labels = managed(**{TEAM: team, RUN: run})
    return labels | ({ROLE: role} if role else {})
