"""Infra and the trainer never import each other; this test keeps their lists of models one."""

from __future__ import annotations

from typing import get_args

from infra.runs.file import MODELS, ModelName
from training.models import MODELS as TABLE


def test_a_run_file_may_name_exactly_the_models_the_trainer_can_build() -> None:
    assert tuple(TABLE) == MODELS == get_args(ModelName)
