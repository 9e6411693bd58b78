"""The run as the pod sees it: /etc/trainyard/run.json, checked whole before anything else happens."""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from training.errors import ConfigurationError
from training.models import MODELS

RUN_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"


class Section(BaseModel):
    """A part of the file: cannot change, knows its keys, and never repeats a value in an error by itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Data(Section):
    """The dataset: where its packed shards lie, and what they are packed from."""

    name: str = Field(min_length=1)
    prefix: str = Field(min_length=1, pattern=r"[^/]$")
    source: str = Field(min_length=1)
    pattern: str = Field(default="*", min_length=1)
    bucket: str | None = Field(default=None, min_length=1)


class Train(Section):
    """How to train. `batch_size` is sequences per process and step."""

    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    sequence_length: int = Field(ge=2)
    learning_rate: float = Field(gt=0, allow_inf_nan=False)
    warmup_steps: int = Field(ge=0)
    weight_decay: float = Field(ge=0, allow_inf_nan=False)
    grad_clip: float = Field(gt=0, allow_inf_nan=False)
    seed: int = Field(ge=0, lt=2**63)
    log_every: int = Field(ge=1)

    @model_validator(mode="after")
    def _warmup_fits(self) -> "Train":
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps is {self.warmup_steps}, but there are only {self.steps} steps; give at most that many")
        return self


class Checkpoint(Section):
    """When to save, and how many committed checkpoints to keep."""

    every_steps: int = Field(ge=1)
    keep: int = Field(ge=1)


def _known_model(name: str) -> str:
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; allowed: {', '.join(MODELS)}")
    return name


class RunConfig(Section):
    """The whole file."""

    run: str = Field(max_length=40, pattern=RUN_NAME)
    bucket: str = Field(min_length=1)
    model: Annotated[str, AfterValidator(_known_model)]
    data: Data
    train: Train
    checkpoint: Checkpoint
    processes: int = Field(ge=1)
    grace_seconds: int = Field(ge=1)

    @property
    def data_bucket(self) -> str:
        """Give the bucket of the dataset: the run's own unless the dataset names another."""
        return self.data.bucket or self.bucket

    @property
    def global_batch(self) -> int:
        """Count the sequences of one step over all processes."""
        return self.train.batch_size * self.processes


def load(path: Path) -> RunConfig:
    """Read and check the file; a ConfigurationError lists every problem with its key."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}; the run's ConfigMap must be mounted there") from None
    except ValueError as error:
        raise ConfigurationError(f"{path}: is not JSON: {error}") from None
    try:
        return RunConfig.model_validate(content)
    except ValidationError as error:
        problems = [f"  {_describe(problem)}" for problem in error.errors(include_url=False, include_input=False)]
        raise ConfigurationError("\n".join([f"{path}: {len(problems)} problem(s)", *problems])) from None


def _describe(problem: Any) -> str:
    """Turn one finding of pydantic into `key path: what is wrong or allowed`."""
    location = [str(part) for part in problem["loc"]]
    where = ".".join(location) or "(whole file)"
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key; allowed: {', '.join(_keys_beside(location))}"
    if problem["type"] == "missing":
        return f"{where}: is missing"
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}"


def _keys_beside(location: list[str]) -> list[str]:
    """List the keys that the section of a wrong key does have."""
    section: type[BaseModel] = RunConfig
    for part in location[:-1]:
        annotation = section.model_fields[part].annotation
        assert isinstance(annotation, type)
        section = annotation
    return list(section.model_fields)
