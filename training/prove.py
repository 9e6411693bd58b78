"""Loads a checkpoint's weights back in one process, on the CPU: to prove it by its validation loss, and to export it.

Nothing is verified here. DCP loads flipped bits without a word, so the caller asks the catalog first.
"""

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod

import torch
from s3torchconnectorclient import S3Exception
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from training.catalog import Catalog, CheckpointManifest, DamagedCheckpointError
from training.checkpoint import failure, reader
from training.config import RunConfig
from training.data import Loader
from training.dataset import find_dataset
from training.evaluate import validation_loss
from training.model import Decoder
from training.models import MODELS
from training.store import Store

WEIGHTS = "model."
SHARE = 8  # one in so many CPUs may be busy beside the training


class Weights:
    """The tensors of the model in one checkpoint, by their names in the decoder. `sizes` has the bytes of each."""

    def __init__(self, catalog: Catalog, manifest: CheckpointManifest) -> None:
        self._uri, self._source = catalog.uri(manifest.step), reader(catalog, manifest)
        with self._explained():
            stored = self._source.read_metadata().state_dict_metadata
        tensors = {name.removeprefix(WEIGHTS): entry for name, entry in stored.items() if name.startswith(WEIGHTS)}
        self._stored = {name: entry for name, entry in tensors.items() if isinstance(entry, TensorStorageMetadata)}
        self.sizes = {name: prod(entry.size) * entry.properties.dtype.itemsize for name, entry in self._stored.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read some of them. What cannot be read is damaged, unless it is the store that failed."""
        with self._explained():
            tensors = {name: torch.empty(self._stored[name].size, dtype=self._stored[name].properties.dtype) for name in names}
            state = {WEIGHTS + name: tensor for name, tensor in tensors.items()}
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # that this is one process
                state_dict_loader.load(state, storage_reader=self._source, no_dist=True)
            return tensors

    def load(self, decoder: Decoder) -> None:
        """Put all of them into a decoder, which may be without memory."""
        tensors = self.read(decoder.state_dict())
        with self._explained():
            decoder.load_state_dict(tensors, assign=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (CheckpointException, Exception) as error:  # noqa: BLE001 - metadata is a pickle, which may raise anything
            causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
            explained = failure(error, f"{self._uri} cannot be loaded")
            transient = any(isinstance(cause, OSError | S3Exception) for cause in causes)
            raise (explained if transient else DamagedCheckpointError(explained.message)) from None


def prove(catalog: Catalog, manifest: CheckpointManifest) -> float:
    """Compute the validation loss of a checkpoint's weights as the training did."""
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // SHARE, 1))
    config = RunConfig.model_validate(manifest.config)
    shape, train = MODELS[config.model], config.train
    with torch.device("meta"):
        decoder = Decoder(shape)
    Weights(catalog, manifest).load(decoder)
    loader = Loader(config, find_dataset(Store(config.data_bucket), config.data.prefix), data_rank=0)
    windows = loader.validation()
    loader.close()
    return validation_loss(decoder, windows, train.batch_size, shape.vocabulary, train.precision, torch.device("cpu"))
