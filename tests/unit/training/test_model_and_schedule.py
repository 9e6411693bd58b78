"""The model is what its name says, and the learning rate is a function of the step."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from training.config import Train
from training.model import Decoder, initialize, parameter_count
from training.models import BYTES, MODELS
from training.optimizer import FLOOR, build_optimizer, learning_rate, set_learning_rate

COUNTS = {  # of the ones known elsewhere: Llama 3's own figures
    "byte-1m": 1_009_024,
    "byte-2m": 1_836_288,
    "byte-3m": 3_082_496,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
}
SMALL = [name for name in MODELS if name.startswith("byte-")]


def train(**changes: Any) -> Train:
    given = {"steps": 100, "batch_size": 2, "sequence_length": 16, "learning_rate": 0.01, "warmup_steps": 10, "weight_decay": 0.1}
    return Train.model_validate({**given, "grad_clip": 1.0, "seed": 1, "log_every": 1, **changes})


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_size_that_the_table_says(name: str) -> None:
    with torch.device("meta"):
        count = parameter_count(Decoder(MODELS[name]))
    assert count == MODELS[name].parameters == COUNTS.get(name, count)
    number, unit = name.split("-")[1][:-1], {"m": 1e6, "b": 1e9}[name[-1]]
    assert abs(count / unit - int(number)) < max(1, 0.2 * int(number)), "it is as large as it is called"


@pytest.mark.parametrize("name", ["byte-2m", "byte-3m", "byte-44m"])
def test_the_flops_of_a_token_are_those_of_its_matrix_products(name: str) -> None:
    shape, length = MODELS[name], 64
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        Decoder(shape)(torch.zeros(1, length, dtype=torch.int64)).sum().backward()
    assert counter.get_total_flops() / length == pytest.approx(shape.flops_per_token(length), rel=0.03)


@pytest.mark.parametrize("name", SMALL)
def test_a_position_sees_what_came_before_and_nothing_after(name: str) -> None:
    torch.manual_seed(0)
    model = Decoder(MODELS[name])
    initialize(model, "", MODELS[name].layers, seed=0)
    tokens = torch.randint(BYTES, (1, 32))
    other = tokens.clone()
    other[0, 20] = (other[0, 20] + 1) % BYTES
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


def test_wsd_is_constant_between_warmup_and_decay() -> None:
    rates = [learning_rate(step, train(schedule="wsd", decay_steps=20)) for step in range(1, 101)]
    assert rates[9:81] == pytest.approx([0.01] * 72)
    assert rates[80:] == pytest.approx([0.01 * left / 20 for left in range(20, 0, -1)])


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
