"""What the tests of pure builders share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def _plain(value: Any) -> Any:
    if type(value).__module__.startswith("pulumi_kubernetes."):
        return {name: _plain(inner) for name, inner in vars(value).items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return value


@pytest.fixture(scope="session")
def plain() -> Callable[[Any], Any]:
    """Return a function that turns the SDK's argument objects into plain data, with the SDK's names."""
    return _plain
