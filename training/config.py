"""The run as the pod sees it: /etc/trainyard/run.json, checked whole before anything else happens."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from training.errors import ConfigurationError
from training.mesh import Mesh, Section
from training.models import MODELS

RUN_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"


class Data(Section):
    """The dataset: where its packed shards lie, what they are packed from, and how they are read."""

    name: str = Field(min_length=1)
    prefix: str = Field(min_length=1, pattern=r"[^/]$")
    source: str = Field(min_length=1)
    pattern: str = Field(default="*", min_length=1)
    bucket: str | None = Field(default=None, min_length=1)
    validation_windows: int = Field(default=32, ge=1)  # the last ones of the dataset, never trained on
    shuffle_shards: int = Field(default=4, ge=1)  # shards whose windows are mixed with each other
    cache_folder: str | None = None
    cache_bytes: int | None = Field(default=None, ge=1)


class Train(Section):
    """How to train. `batch_size` is sequences per micro-step and data-parallel rank; a step has `accumulation` micro-steps."""

    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    accumulation: int = Field(default=1, ge=1)
    sequence_length: int = Field(ge=2)
    learning_rate: float = Field(gt=0, allow_inf_nan=False)
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: int = Field(ge=0)
    decay_steps: int | None = Field(default=None, ge=1)  # of "wsd"; a tenth of the steps when not given
    weight_decay: float = Field(ge=0, allow_inf_nan=False)
    grad_clip: float = Field(gt=0, allow_inf_nan=False)
    precision: Literal["float32", "bfloat16", "fp8"] = "float32"
    recompute: Literal["none", "selective", "full"] = "none"
    compile: bool = False
    seed: int = Field(ge=0, lt=2**63)
    log_every: int = Field(ge=1)
    evaluate_every: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _warmup_fits(self) -> "Train":
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps is {self.warmup_steps}, but there are only {self.steps} steps; give at most that many")
        if self.warmup_steps + (self.decay_steps or 0) > self.steps:
            raise ValueError(
                f"warmup_steps and decay_steps are {self.warmup_steps + (self.decay_steps or 0)}, more than the {self.steps} steps"
            )
        return self


class Checkpoint(Section):
    """When to save, where, and how many checkpoints to keep in which role."""

    every_steps: int | None = Field(default=None, ge=1)
    every_seconds: float | None = Field(default=None, gt=0)
    milestone_steps: int | None = Field(default=None, ge=1)
    keep: int = Field(default=3, ge=1)
    keep_best: int = Field(default=1, ge=0)
    keep_milestones: int | None = Field(default=None, ge=1)  # newest ones; all when not given
    asynchronous: bool = True
    folder: str | None = Field(default=None, pattern="^/")  # a mounted path instead of the bucket
    prove: bool = True  # load the newest one back beside the training and reproduce its validation loss

    @model_validator(mode="after")
    def _ever(self) -> "Checkpoint":
        if self.every_steps is None and self.every_seconds is None:
            raise ValueError("give every_steps or every_seconds, or both; for example every_seconds: 300")
        return self


class Eviction(Section):
    """Where, beside SIGTERM, the news of an eviction comes from."""

    metadata_service: str | None = None  # address of IMDSv2, for example http://169.254.169.254
    poll_seconds: float = Field(default=5.0, gt=0)


class Preflight(Section):
    """The test of the network between the ranks, before the first step."""

    enabled: bool = True
    floor_gigabytes_per_second: float | None = Field(default=None, gt=0)  # instead of the one in the hardware table
    megabytes: int = Field(default=16, ge=1)


class Metrics(Section):
    """The Prometheus endpoint of each node; no port, no endpoint."""

    host: str = "0.0.0.0"  # noqa: S104 - a pod has its address for itself, and a NetworkPolicy
    port: int | None = Field(default=None, ge=0, lt=65536)


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
    mesh: Mesh = Mesh()
    eviction: Eviction = Eviction()
    preflight: Preflight = Preflight()
    metrics: Metrics = Metrics()
    processes: int = Field(ge=1)  # of all nodes together: the world size
    nodes: int = Field(default=1, ge=1)
    grace_seconds: int = Field(ge=1)
    hang_seconds: float = Field(default=300.0, gt=0)
    accept_changes: frozenset[str] = frozenset()  # of model, tokenizer, data: what may differ from the checkpoint that is resumed

    @model_validator(mode="after")
    def _mesh_fits(self) -> "RunConfig":
        if self.processes % self.nodes:
            raise ValueError(f"processes: {self.processes} do not divide evenly over {self.nodes} nodes")
        problems = self.mesh.problems(self.processes, MODELS[self.model], self.train.sequence_length, self.train.accumulation)
        if problems:
            raise ValueError("\n    ".join(problems))
        return self

    @property
    def data_bucket(self) -> str:
        """Give the bucket of the dataset: the run's own unless the dataset names another."""
        return self.data.bucket or self.bucket

    @property
    def data_degree(self) -> int:
        """Count the groups of ranks that see different samples."""
        return self.processes // (self.mesh.tensor * self.mesh.pipeline)

    @property
    def global_batch(self) -> int:
        """Count the sequences of one step over all processes."""
        return self.train.batch_size * self.train.accumulation * self.data_degree


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
