"""Moves the state of training between memory and storage with torch's distributed checkpoint (DCP), every rank its part.

Traps that this module knows: CheckpointException is a BaseException; a store that is not AWS needs path style and AWS_ENDPOINT_URL;
DCP loads flipped bits without a word, which is why catalog.py verifies first; the uploader is the child of the thread that starts it.
"""

import io
import logging
import os
import pickle
import resource
import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any, cast

import torch
import torch.distributed as dist
from s3torchconnector import S3ClientConfig
from s3torchconnector.dcp import S3StorageReader
from s3torchconnector.dcp.s3_file_system import S3FileSystem
from torch import nn
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from training.catalog import Catalog, CheckpointManifest, StoredObject
from training.config import RunConfig
from training.errors import StoreError, SupersededError, TrainerError
from training.ranks import on_rank_zero
from training.store import Store, path_style, place_of, region
from training.work import die_with_parent

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # not by position, which another mesh would change
NICENESS = 10  # of the uploader; the training comes first
LARGE_WRITE = 1 << 20  # bytes; handing over fewer takes longer than hashing them


class HashingStream(io.BufferedIOBase):
    """Passes bytes on and remembers their number and SHA-256."""

    def __init__(self, target: io.IOBase) -> None:
        self._target: Any = target
        self._digest, self._hasher = sha256(), ThreadPoolExecutor(1)
        self._size = 0

    def write(self, data: Any, /) -> int:
        """Pass bytes on, and hash them meanwhile when they are many."""
        size = memoryview(data).nbytes
        hashed = self._hasher.submit(self._digest.update, data) if size > LARGE_WRITE else self._digest.update(data)
        written = self._target.write(data)
        if hashed is not None:
            hashed.result()
        self._size += size
        return written

    def tell(self) -> int:
        """Give the number of bytes so far; DCP notes it as the offset of each tensor."""
        return self._size

    def writable(self) -> bool:
        """Say that this stream is for writing."""
        return True

    def result(self, path: Any) -> StoredObject:
        """Describe the object that was written."""
        self._hasher.shutdown()
        return StoredObject(name=PurePosixPath(str(path)).name, bytes=self._size, sha256=self._digest.hexdigest())


class HashingBucket(S3FileSystem):
    """Writes objects and keeps the digest of what was sent, so that damage on the way shows when the object is read back."""

    def __init__(self) -> None:
        super().__init__(region(), s3client_config=_client_config())
        self.written: list[StoredObject] = []

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        """Open an object for writing."""
        with super().create_stream(path, mode) as stream:
            hashing = HashingStream(stream)
            yield hashing
        self.written.append(hashing.result(path))


class HashingFolder(FileSystem):
    """Does the same with files, and has them on the disk before they are counted as written."""

    def __init__(self) -> None:
        self.written: list[StoredObject] = []

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        """Open a file for writing."""
        with super().create_stream(path, mode) as stream:
            hashing = HashingStream(stream)
            yield hashing
            stream.flush()
            os.fsync(stream.fileno())
        self.written.append(hashing.result(path))


class Writer(FileSystemWriter):
    """Writes a checkpoint, and commits it on the coordinating rank. It travels to the uploaders, so it opens nothing before they use it."""

    def __init__(self, uri: str, config: RunConfig, manifest: CheckpointManifest) -> None:
        super().__init__(uri, sync_files=False, per_thread_copy_ahead=0)
        self.path, self._config, self._manifest = uri, config, manifest

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Open the storage."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self.fs = self._files = HashingFolder() if self._config.checkpoint.folder else HashingBucket()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder. What an earlier failure of this attempt left there is overwritten."""
        self.fs.mkdir(self.path)
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's objects, and send their sums to the coordinator among the results."""
        results = super().write_data(plan, planner).wait()
        sums = [WriteResult(MetadataIndex(item.name), item.bytes, item) for item in self._files.written]
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result([*results, *sums])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and commit. The workers get the manifest in its place, which is smaller."""
        told = [(result.index, result.storage_data) for part in results for result in part]
        metadata.version, metadata.storage_meta = CURRENT_DCP_VERSION, self.storage_meta()
        metadata.storage_data = {index: data for index, data in told if not isinstance(data, StoredObject)}
        with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "wb") as stream:
            pickle.dump(metadata, cast(Any, stream))
        objects = (*(data for _, data in told if isinstance(data, StoredObject)), self._files.written[-1])
        manifest = self._manifest.model_copy(update={"objects": objects, "time": time.time()})
        Catalog(place_of(self._config), manifest.run).commit(manifest)
        metadata.storage_data, metadata.state_dict_metadata = manifest, {}


class Start(executor._ProcessGroupInitInfo):
    """What an uploader is given first. Unpacking it, it steps back behind the training, dies with the worker, and leaves errors to it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        die_with_parent()
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
        logging.disable(logging.CRITICAL)


class Uploader:
    """The process beside each worker that writes what was staged, and the memory that both see. All ranks start it together."""

    def __init__(self, state: dict[str, Any]) -> None:
        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # each shared tensor is an open file
        cuda = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(use_pinned_memory=cuda, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=cuda)
        )
        # Here and not in the thread of the first save: the kernel counts the end of that thread as the death of the parent.
        executor._CHECKPOINT_PROCESS = executor._AsyncCheckpointProcess(Start())
        self._stager.stage(state)

    def save(self, state: dict[str, Any], writer: Writer) -> Future:
        """Copy the state, and write the copy while the training goes on. The save before must have ended: there is one copy."""
        saving = state_dict_saver.async_save(
            state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS, async_stager=self._stager
        )
        assert isinstance(saving, Future)
        return saving

    def close(self) -> None:
        """End the process. It holds nothing but copies, and a save that still runs comes to nothing."""
        process, executor._CHECKPOINT_PROCESS = executor._CHECKPOINT_PROCESS, None
        self._stager.close()
        if process is not None:
            process._save_process.kill()
            process._save_process.join()


def save_now(state: dict[str, Any], writer: Writer) -> Future:
    """Write the state in this process; the result or the error is in the future, as with the uploader."""
    future: Future = Future()
    try:
        future.set_result(state_dict_saver.save(state, storage_writer=writer))
    except (CheckpointException, Exception) as error:  # noqa: BLE001 - explained by `failure`
        future.set_exception(error)
    return future


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Name the tensors of model, optimizer and random generators. What the optimizer is told by the run's file is not among them."""
    untouched = not optimizer.state
    model_state, optimizer_state = get_state_dict(model, optimizer, options=BY_NAME)
    if untouched:  # DCP has made an update without gradients to find out what the state will be
        for entry in optimizer.state.values():
            entry["step"].zero_()
    tensors = {name: value for name, value in optimizer_state.items() if name.startswith("state.")}
    return {"model": model_state, "optimizer": tensors, "rng": {str(dist.get_rank()): _random_state()}}


def staged_bytes(state: dict[str, Any]) -> int:
    """Count the memory that a copy of this rank's part takes."""
    tensors = (leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}.values())


def reader(catalog: Catalog, manifest: CheckpointManifest) -> FileSystemReader:
    """Open a checkpoint for reading."""
    uri = catalog.place.uri(catalog.folder(manifest.step, manifest.attempt)).rstrip("/")
    return S3StorageReader(region(), uri, s3client_config=_client_config()) if isinstance(catalog.place, Store) else FileSystemReader(uri)


def load_state(source: FileSystemReader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read what was saved into model, optimizer and, at last, random generators, for any mesh. All ranks call it.

    A rank that the saving run did not have keeps the random state that its seed gave it.
    """
    state, rank = state_of(model, optimizer), str(dist.get_rank())
    try:
        saved = on_rank_zero(lambda: _random_names(source))
        random_state = {kind: value for kind, value in state["rng"][rank].items() if f"rng.{rank}.{kind}" in saved}
        state["rng"] = {rank: random_state}
        state_dict_loader.load(state, storage_reader=source)
    except CheckpointException as error:
        raise failure(error, f"the checkpoint {source.path} is intact but cannot be loaded") from None
    _, settings = get_state_dict(model, optimizer, options=BY_NAME)
    optimizer_state: Any = {**settings, **state["optimizer"]}
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state, options=BY_NAME)
    if "cpu" in random_state:
        torch.set_rng_state(random_state["cpu"])
    if "cuda" in random_state:
        torch.cuda.set_rng_state(random_state["cuda"])


def failure(error: BaseException, what: str) -> TrainerError:
    """Turn whatever ended a save or a load into one error that says why."""
    causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    superseded = [cause for cause in causes if isinstance(cause, SupersededError)]
    texts = {cause.message if isinstance(cause, TrainerError) else f"{type(cause).__name__}: {cause}" for cause in causes}
    return superseded[0] if superseded else StoreError(f"{what}: {'; '.join(sorted(texts))}")


def _random_names(source: FileSystemReader) -> set[str]:
    try:
        return {name for name in source.read_metadata().state_dict_metadata if name.startswith("rng.")}
    except Exception as error:  # noqa: BLE001 - the metadata is a pickle, which may raise anything
        raise failure(error, f"the metadata of {source.path} cannot be read") from None


def _random_state() -> dict[str, torch.Tensor]:
    """Give the states of torch's generators. Nothing in training draws from those of Python or numpy."""
    state = {"cpu": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def _client_config() -> S3ClientConfig:
    """Configure the S3 client of the connector; it reads AWS_ENDPOINT_URL by itself."""
    return S3ClientConfig(force_path_style=path_style())
