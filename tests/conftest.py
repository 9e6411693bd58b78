"""What every tier shares."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import pytest

Found = TypeVar("Found")


class Until(Protocol):
    """Poll with a deadline; see `until`."""

    def __call__(self, what: str, look: Callable[[], Found], seconds: float = 60.0) -> Found:
        """Return the first true value of `look`."""
        ...


@pytest.fixture(scope="session")
def until() -> Until:
    """Return a function that looks again and again until it finds something true, and fails naming what never came."""

    def poll(what: str, look: Callable[[], Found], seconds: float = 60.0) -> Found:
        deadline = time.monotonic() + seconds
        while not (found := look()):
            if time.monotonic() > deadline:
                pytest.fail(f"{what}: not seen within {seconds:.0f} s")
            time.sleep(0.2)
        return found

    return poll
