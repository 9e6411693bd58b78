"""Which checkpoints of a run stay, and in which role. Pure: it sees steps and losses, and deletes nothing itself.

newest     the last `keep` ones
best       the `keep_best` ones with the lowest validation loss
milestone  every one whose step is a multiple of `milestone_steps`; the newest `keep_milestones` of them, or all
good       the newest one that was loaded back and reproduced its validation loss: the last-known-good
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from training.config import Checkpoint


@dataclass(frozen=True)
class Plan:
    """Steps that stay, each with its roles, and steps that may be deleted. Both ascend."""

    kept: dict[int, list[str]]
    deleted: list[int]


def plan(losses: Mapping[int, float | None], good: Collection[int], verified: int | None, policy: Checkpoint) -> Plan:
    """Divide the committed checkpoints, given as step and validation loss.

    `verified` is the step that has just been read back. Without it nothing may go, and what is newer has not been looked at and stays
    without a role: an unread checkpoint never takes the place of one that was read.
    """
    if verified is None or verified not in losses:
        return Plan({step: [] for step in sorted(losses)}, [])
    roles = _roles({step: loss for step, loss in losses.items() if step <= verified}, good, policy)
    kept = {step: roles.get(step, []) for step in sorted(losses) if step in roles or step > verified}
    return Plan(kept, [step for step in sorted(losses) if step not in kept])


def is_debris(step: int, attempt: int, owners: Mapping[int, int | None], current: int) -> bool:
    """Tell whether what an attempt wrote for a step belongs to no checkpoint, and never will.

    `owners` maps each committed step to the attempt whose data its mark names, or None when that cannot be read. An attempt saves its
    steps in order, so what it left before the newest committed step has failed.
    """
    if step in owners:
        return owners[step] not in {None, attempt}
    return attempt < current or (attempt == current and step < max(owners, default=0))


def _roles(losses: Mapping[int, float | None], good: Collection[int], policy: Checkpoint) -> dict[int, list[str]]:
    """Give every step that has a role its roles."""
    newest_first = sorted(losses, reverse=True)
    scored = {step: loss for step in newest_first if (loss := losses[step]) is not None and math.isfinite(loss)}
    every = policy.milestone_steps
    members = {
        "newest": newest_first[: policy.keep],
        "best": sorted(scored, key=scored.__getitem__)[: policy.keep_best],  # stable: of equal ones the newest
        "milestone": [step for step in newest_first if every and step % every == 0][: policy.keep_milestones],
        "good": [step for step in newest_first if step in good][:1],
    }
    roles: dict[int, list[str]] = {}
    for role, steps in members.items():
        for step in steps:
            roles.setdefault(step, []).append(role)
    return roles
