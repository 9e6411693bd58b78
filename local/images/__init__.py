"""Images without a registry: the controllers' from one static binary each, the trainer's from its Dockerfile."""

from __future__ import annotations

from local.images.controllers import load as load_controllers

__all__ = ["load_controllers"]
