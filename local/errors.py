"""The one exception for a user's bad luck: a message to read, never a traceback."""

from __future__ import annotations


class Problem(Exception):  # noqa: N818 - it is shown to people, who have problems, not errors
    """Something the user can act on: what is wrong, where, and what to do."""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        """Keep the three parts; `where` and `fix` may be empty."""
        super().__init__(what)
        self.what, self.where, self.fix = what, where, fix

    def __str__(self) -> str:
        """Return the message as printed: one part a line."""
        parts = [self.what, self.where and f"  where: {self.where}", self.fix and f"  do:    {self.fix}"]
        return "\n".join(part for part in parts if part)
