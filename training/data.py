"""Feeds a rank: the batches that come after a cursor, read ahead through the cache, and the windows held out for validation."""

import time
from concurrent.futures import Future, wait

import numpy as np
import torch
from numpy.typing import NDArray

from training.cache import Cache, background, cache_folder
from training.config import RunConfig
from training.dataset import Cursor, Manifest, Place, Sampler, split
from training.store import Store


class Loader:
    """The samples of one data-parallel rank. It prepares the next step's batch while this step is computed, in a thread of its own.

    `cursor` is the place after the batch that `next` gave last; `wait_seconds` is the time that `next` has blocked. What goes wrong in
    the thread (DataError, or StoreError when the store fails) is raised by `next`.
    """

    def __init__(self, config: RunConfig, manifest: Manifest, *, data_rank: int) -> None:
        train, data = config.train, config.data
        self.cursor, self.wait_seconds = Cursor(train.seed), 0.0
        self._length, self._batch = train.sequence_length, config.global_batch
        windows, self._held_out = split(manifest, self._length, data.validation_windows)
        self._sampler = Sampler(windows, data.shuffle_shards)
        self._cache = Cache(Store(config.data_bucket), data.prefix, manifest, cache_folder(config), data.cache_bytes)
        # Of a step's samples, the data ranks take turns with `batch_size` of them each; one round is a micro-step.
        self._offsets = np.arange(self._batch).reshape(train.accumulation, config.data_degree, train.batch_size)[:, data_rank]
        self._open: dict[int, np.memmap] = {}
        self._near: list[int] = []
        self._prepared: Future[torch.Tensor] | None = None

    def seek(self, cursor: Cursor) -> None:
        """Go on from there, and begin to prepare the first batch."""
        if self._prepared is not None:
            wait([self._prepared])
        self.cursor = cursor.advanced(0, self._sampler.windows)
        self._prepared = background(self._prepare, self.cursor)

    def next(self) -> torch.Tensor:
        """Give the next batch, int64 (accumulation, batch_size, sequence_length + 1), and begin to prepare the one after it."""
        if self._prepared is None:
            self.seek(self.cursor)
        assert self._prepared is not None
        began = time.monotonic()
        try:
            batch = self._prepared.result()
        finally:
            self.wait_seconds += time.monotonic() - began
        self.cursor = self.cursor.advanced(self._batch, self._sampler.windows)
        self._prepared = background(self._prepare, self.cursor)
        return batch

    def validation(self) -> torch.Tensor:
        """Give the held-out windows, int64 (validation_windows, sequence_length + 1), the same on every rank."""
        shards = {place.shard: self._cache.open(place.shard) for place in self._held_out}
        return torch.from_numpy(np.stack([self._window(shards[place.shard], place) for place in self._held_out]).astype(np.int64))

    def close(self) -> None:
        """Let go of the shards; a read that is under way is left to end by itself."""
        self._prepared = None
        self._open = {}

    def _prepare(self, cursor: Cursor) -> torch.Tensor:
        """Read the batch that follows the cursor."""
        batch = np.empty((*self._offsets.shape, self._length + 1), np.int64)
        for position, offset in np.ndenumerate(self._offsets):
            sample = cursor.advanced(int(offset), self._sampler.windows)
            place = self._sampler.place(sample)
            if place.shard not in self._open:
                self._turn_to(sample)
                self._open[place.shard] = self._cache.open(place.shard)
            batch[position] = self._window(self._open[place.shard], place)
        return torch.from_numpy(batch)

    def _turn_to(self, sample: Cursor) -> None:
        """Let go of the shards that are not of the sample's group or the next; the first time, fetch those two."""
        near = self._sampler.near(sample)
        self._open = {shard: tokens for shard, tokens in self._open.items() if shard in near}
        if near != self._near:
            self._near = near
            # Nobody asks for the result: a shard that could not be fetched is tried again, and the error told, when it is needed.
            background(self._fetch, near)

    def _fetch(self, shards: list[int]) -> None:
        for shard in shards:
            self._cache.open(shard)

    def _window(self, tokens: np.memmap, place: Place) -> NDArray[np.generic]:
        """Give `length` tokens and the one after them."""
        return tokens[place.window * self._length : (place.window + 1) * self._length + 1]
