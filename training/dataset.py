"""What a packed dataset is: its manifest, the windows of its shards, and the order in which they are seen."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from training.config import RunConfig
from training.errors import DataError
from training.models import ModelShape
from training.store import MissingObjectError, Store

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Shard(BaseModel):
    """One object with tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    bytes: int = Field(gt=0)
    tokens: int = Field(gt=0)
    sha256: Sha256


class Manifest(BaseModel):
    """The whole dataset. Its SHA-256 is the identity of the dataset, so it holds nothing that changes from packing to packing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    tokenizer: str  # "bytes" is the built-in one
    vocabulary: int = Field(ge=1)  # every token is below it
    tokens: int = Field(gt=0)
    dtype: Literal["uint8", "uint16", "uint32"]  # of a token, little endian
    files: int | None = Field(default=None, ge=1)
    source_fingerprint: Sha256 | None = None
    shards: tuple[Shard, ...] = Field(min_length=1)

    def to_json(self) -> bytes:
        """Write the manifest; equal manifests give equal bytes."""
        return (json.dumps(self.model_dump(mode="json"), indent=1) + "\n").encode()

    @property
    def sha256(self) -> str:
        """Identify the dataset by its content."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @property
    def token_type(self) -> np.dtype:
        """Give the type of a token as it lies in a shard."""
        return np.dtype(self.dtype).newbyteorder("<")

    @model_validator(mode="after")
    def _true(self) -> "Manifest":
        size = self.token_type.itemsize
        for shard in self.shards:
            if shard.bytes != shard.tokens * size:
                raise ValueError(f"{shard.name} has {shard.bytes} bytes, but {shard.tokens} tokens of {size} bytes")
        if sum(shard.tokens for shard in self.shards) != self.tokens or len({shard.name for shard in self.shards}) != len(self.shards):
            raise ValueError(f"the shards do not add up to {self.tokens} tokens, or two have one name")
        return self


def manifest_key(prefix: str) -> str:
    """Name the manifest object; it is written last, so a dataset exists when it exists."""
    return f"{prefix}/manifest.json"


def read_manifest(store: Store, prefix: str) -> Manifest | None:
    """Read the manifest of a dataset; None when there is none."""
    key = manifest_key(prefix)
    try:
        return Manifest.model_validate_json(store.get(key))
    except MissingObjectError:
        return None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = " ".join([".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")]).strip()
        raise DataError(f"{store.uri(key)} is not a dataset manifest ({problem}): correct it, or prepare the dataset again") from None


def find_dataset(store: Store, prefix: str) -> Manifest:
    """Read the manifest of a dataset that must be there."""
    manifest = read_manifest(store, prefix)
    if manifest is None:
        raise DataError(
            f"there is no dataset at {store.uri(prefix)} (no manifest.json): the preparation Job has not finished; see its events"
        )
    return manifest


class Place(NamedTuple):
    """Where a window is: it never reaches over the end of its shard."""

    shard: int
    window: int


def split(manifest: Manifest, length: int, held_out: int) -> tuple[list[int], list[Place]]:
    """Give how many windows of `length` tokens (and the one after them) each shard has for training, and the last ones, held out."""
    windows = [(shard.tokens - 1) // length for shard in manifest.shards]
    if sum(windows) <= held_out:
        raise DataError(
            f"the dataset {manifest.name} has {manifest.tokens} tokens, too few: in its {len(windows)} shard(s) they are {sum(windows)} "
            f"whole sequence(s) of {length} (train.sequence_length), and {held_out} are held out (data.validation_windows); "
            f"{held_out + 1} are needed"
        )
    kept: list[Place] = []
    for shard in reversed(range(len(windows))):
        while windows[shard] and len(kept) < held_out:
            windows[shard] -= 1
            kept.append(Place(shard, windows[shard]))
    return windows, kept[::-1]


def check_fits(manifest: Manifest, shape: ModelShape, config: RunConfig) -> None:
    """Refuse a dataset that this model cannot read, that is too short, or that the cache cannot hold enough of."""
    if manifest.vocabulary > shape.vocabulary:
        raise DataError(
            f"the dataset {manifest.name} has a vocabulary of {manifest.vocabulary} (tokenizer {manifest.tokenizer}), "
            f"the model {config.model} one of {shape.vocabulary}: give a model with at least as many, or another dataset"
        )
    split(manifest, config.train.sequence_length, config.data.validation_windows)
    group, limit = config.data.shuffle_shards, config.data.cache_bytes
    needed = sum(sorted((shard.bytes for shard in manifest.shards), reverse=True)[: 2 * group])
    if limit is not None and limit < needed:
        raise DataError(
            f"data.cache_bytes is {limit}, but the dataset {manifest.name} needs {needed}: {group} shards are mixed with each other "
            "(data.shuffle_shards) and as many are fetched ahead; raise the one or lower the other"
        )


@dataclass(frozen=True)
class Cursor:
    """Where training is in the data: `sample` windows of `epoch` have been seen, in the order that `seed` gives."""

    seed: int
    epoch: int = 0
    sample: int = 0

    def advanced(self, count: int, windows: int) -> "Cursor":
        """Move on by `count` samples of a dataset with `windows` windows."""
        epochs, sample = divmod(self.sample + count, windows)
        return Cursor(self.seed, self.epoch + epochs, sample)

    def to_dict(self) -> dict[str, int]:
        """Give the cursor as it is stored in a checkpoint."""
        return asdict(self)


class Sampler:
    """The order of the windows, whatever the batch or the number of processes: a function of seed, epoch and sample.

    An epoch goes through the shards in a random order, `group` of them at a time, and mixes the windows of a group with each other.
    So at any time a reader needs the shards of one group, and the memory of one group's permutation.
    """

    def __init__(self, windows: Sequence[int], group: int) -> None:
        self.windows = sum(windows)
        self._counts, self._group = np.array(windows, np.int64), group
        self._epoch = lru_cache(2)(self._order_shards)
        self._mixed = lru_cache(2)(self._mix_group)

    def place(self, cursor: Cursor) -> Place:
        """Give the window that the cursor points to."""
        group = self._group_of(cursor)
        shards, starts, order = self._mixed(cursor.seed, cursor.epoch, group)
        index = order[cursor.sample - self._epoch(cursor.seed, cursor.epoch)[1][group]]
        within = np.searchsorted(starts, index, side="right") - 1
        return Place(int(shards[within]), int(index - starts[within]))

    def shards(self, cursor: Cursor) -> list[int]:
        """Give the shards of the cursor's epoch in their order."""
        return self._epoch(cursor.seed, cursor.epoch)[0].tolist()

    def near(self, cursor: Cursor) -> list[int]:
        """Give the shards of the cursor's group, then those of the group after it."""
        group = self._group_of(cursor)
        after = cursor.advanced(int(self._epoch(cursor.seed, cursor.epoch)[1][group + 1]) - cursor.sample, self.windows)
        pair = self._shards(cursor.seed, cursor.epoch, group), self._shards(after.seed, after.epoch, self._group_of(after))
        return np.concatenate(pair).tolist()

    def _group_of(self, cursor: Cursor) -> int:
        return int(np.searchsorted(self._epoch(cursor.seed, cursor.epoch)[1], cursor.sample, side="right")) - 1

    def _shards(self, seed: int, epoch: int, group: int) -> NDArray[np.int64]:
        return self._epoch(seed, epoch)[0][group * self._group : (group + 1) * self._group]

    def _order_shards(self, seed: int, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Give the shards of an epoch in order, and the sample that each group begins with, and the last one ends before."""
        shards = _generator(seed, epoch).permutation(np.flatnonzero(self._counts))
        begins = _starts(self._counts[shards])
        return shards, np.append(begins[: -1 : self._group], begins[-1])

    def _mix_group(self, seed: int, epoch: int, group: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Give the shards of a group, where each starts in it, and the order of all its windows."""
        shards = self._shards(seed, epoch, group)
        starts = _starts(self._counts[shards])
        # One is added because numpy's seeds do not tell (7, 0) from (7, 0, 0).
        return shards, starts, _generator(seed, epoch, group + 1).permutation(starts[-1])


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(counts)))


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(key))
