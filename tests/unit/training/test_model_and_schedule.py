"""The model is what its name says, and the learning rate is a function of the step."""

from itertools import pairwise

import pytest
import torch

from training.config import Train
from training.model import Decoder, parameter_count
from training.models import MODELS, VOCABULARY
from training.optimizer import FLOOR, build_optimizer, learning_rate, set_learning_rate

COUNTS = {"byte-1m": 1_009_024, "byte-2m": 1_836_288, "byte-3m": 3_082_496}


def train(**changes: float) -> Train:
    given = {"steps": 100, "batch_size": 2, "sequence_length": 16, "learning_rate": 0.01, "warmup_steps": 10, "weight_decay": 0.1}
    return Train.model_validate({**given, "grad_clip": 1.0, "seed": 1, "log_every": 1, **changes})


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_size_of_its_name(name: str) -> None:
    count = parameter_count(Decoder(MODELS[name]))
    assert count == COUNTS[name]
    assert round(count / 1e6) == int(name.removeprefix("byte-").removesuffix("m"))


@pytest.mark.parametrize("name", MODELS)
def test_a_position_sees_what_came_before_and_nothing_after(name: str) -> None:
    torch.manual_seed(0)
    model = Decoder(MODELS[name])
    tokens = torch.randint(VOCABULARY, (1, 32))
    other = tokens.clone()
    other[0, 20] = (other[0, 20] + 1) % VOCABULARY
    before, after = model(tokens), model(other)
    assert torch.allclose(before[:, :20], after[:, :20], atol=1e-6)
    assert not torch.allclose(before[:, 20], after[:, 20], atol=1e-4)
    assert not torch.allclose(before[:, 31], after[:, 31], atol=1e-6)


def test_attention_knows_how_far_away_a_token_is() -> None:
    torch.manual_seed(0)
    model = Decoder(MODELS["byte-1m"])
    tokens = torch.tensor([[65, 66, 67, 68, 69]])
    swapped = torch.tensor([[66, 65, 67, 68, 69]])
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1], atol=1e-6)


def test_the_rate_warms_up_peaks_and_falls_to_the_floor() -> None:
    rates = [learning_rate(step, train()) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.001 * step for step in range(1, 11)])
    assert max(rates) == rates[9]
    assert all(later < earlier for earlier, later in pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(0.01 * FLOOR)


def test_a_run_without_warmup_starts_high() -> None:
    assert learning_rate(1, train(warmup_steps=0)) == pytest.approx(0.01, rel=0.01)


def test_only_matrices_decay() -> None:
    model = Decoder(MODELS["byte-1m"])
    optimizer = build_optimizer(model, train())
    set_learning_rate(optimizer, 0.5)
    matrices, vectors = optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert (matrices["lr"], vectors["lr"]) == (0.5, 0.5)
    assert {parameter.ndim for parameter in matrices["params"]} == {2}
    assert sum(parameter.numel() for parameter in vectors["params"]) == 128 * (2 * 5 + 1)
