"""Moves the state of training between memory and S3 with torch's distributed checkpoint, every rank its part.

Traps that this module knows: CheckpointException is a BaseException; a store that is not AWS needs path style and AWS_ENDPOINT_URL;
DCP loads flipped bits without a word, which is why catalog.py verifies first.
"""

import hashlib
import io
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from s3torchconnector import S3ClientConfig
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
from s3torchconnector.dcp.s3_file_system import S3FileSystem
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from training.catalog import StoredObject
from training.errors import StoreError
from training.ranks import gather
from training.store import path_style, region


class HashingStream(io.BufferedIOBase):
    """Passes bytes on and remembers their number and SHA-256."""

    def __init__(self, target: io.IOBase) -> None:
        self._target: Any = target
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, data: Any, /) -> int:
        """Pass bytes on."""
        self._digest.update(data)
        self._size += memoryview(data).nbytes
        return self._target.write(data)

    def tell(self) -> int:
        """Give the number of bytes so far; DCP notes it as the offset of each tensor."""
        return self._size

    def writable(self) -> bool:
        """Say that this stream is for writing."""
        return True

    def result(self, name: str) -> StoredObject:
        """Describe the object that was written."""
        return StoredObject(name=name, bytes=self._size, sha256=self._digest.hexdigest())


class HashingFileSystem(S3FileSystem):
    """Writes objects and keeps the digest of what was sent, so that damage on the way shows when the object is read back."""

    def __init__(self) -> None:
        super().__init__(region(), s3client_config=_client_config())
        self.written: dict[str, StoredObject] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        """Open an object."""
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            hashing = HashingStream(stream)
            yield hashing
            name = PurePosixPath(str(path)).name
            self.written[name] = hashing.result(name)

    def rename(self, old_path: Any, new_path: Any) -> None:
        """Rename an object; DCP does it with its metadata."""
        super().rename(old_path, new_path)
        old, new = PurePosixPath(str(old_path)).name, PurePosixPath(str(new_path)).name
        self.written[new] = self.written.pop(old).model_copy(update={"name": new})


def save_state(uri: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[StoredObject]:
    """Write model, optimizer and the random state of every rank below a URI, and list the objects. All ranks call it."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "rng": {str(dist.get_rank()): _random_state()}}
    writer = S3StorageWriter(region(), uri, s3client_config=_client_config())
    files = HashingFileSystem()
    writer.fs = files
    try:
        state_dict_saver.save(state, storage_writer=writer)
    except CheckpointException as error:
        raise StoreError(f"the checkpoint {uri} could not be written: {_causes(error)}") from None
    return [item for written in gather(files.written) for item in written.values()]


def load_state(uri: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read what save_state wrote into model, optimizer and random generators, for any number of ranks. All ranks call it.

    A rank that the saving run did not have keeps the random state that its seed gave it.
    """
    reader = S3StorageReader(region(), uri, s3client_config=_client_config())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    rank = str(dist.get_rank())
    saved = reader.read_metadata().state_dict_metadata
    random_state = {kind: value for kind, value in _random_state().items() if f"rng.{rank}.{kind}" in saved}
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "rng": {rank: random_state}}
    state_dict_loader.load(state, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    _set_random_state(state["rng"][rank])


def _random_state() -> dict[str, torch.Tensor]:
    """Give the states of torch's generators. Nothing in training draws from those of Python or numpy."""
    state = {"cpu": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    """Put the generators back."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _client_config() -> S3ClientConfig:
    """Configure the S3 client of the connector; it reads AWS_ENDPOINT_URL by itself."""
    return S3ClientConfig(force_path_style=path_style())


def _causes(error: CheckpointException) -> str:
    """Name the distinct reasons of the ranks."""
    return "; ".join(sorted({f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()}))
