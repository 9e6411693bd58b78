"""Packs text files into shards of byte tokens and uploads them. Idempotent: the same sources are packed once.

In a pod:   python -m training.prepare --config /etc/trainyard/run.json
On a host:  python -m training.prepare --folder PATH --pattern '*.py' --name NAME --bucket BUCKET
"""

import argparse
import hashlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from training.config import load
from training.dataset import DTYPE, Manifest, Shard, manifest_key, read_manifest
from training.errors import DONE, PREFLIGHT, ConfigurationError, DataError, StoreError, TrainerError
from training.events import Events
from training.store import Store

CONFIG_PATH = Path("/etc/trainyard/run.json")
SHARD_BYTES = 1 << 20
SEPARATOR = b"\x00"  # ends a file: no byte of a text is zero
FORMAT = f"bytes-1 {SHARD_BYTES}"  # part of the fingerprint: another way of packing is another dataset


@dataclass(frozen=True)
class Source:
    """The files of a dataset, in packing order, and the fingerprint of their names and contents."""

    files: tuple[Path, ...]
    tokens: int
    fingerprint: str

    @property
    def shards(self) -> int:
        """Count the shards that the files will fill."""
        return -(-self.tokens // SHARD_BYTES)


@dataclass(frozen=True)
class Order:
    """What to pack and where to put it."""

    name: str
    folder: Path
    pattern: str
    prefix: str


def survey(folder: Path, pattern: str) -> Source:
    """Find and fingerprint the files; a folder without a match is a mistake, not an empty dataset."""
    if not folder.is_dir():
        raise DataError(f"the text folder {folder} does not exist (data.source): give a folder that is inside the trainer image")
    files = sorted((path for path in folder.rglob(pattern) if path.is_file()), key=lambda path: path.relative_to(folder).as_posix())
    if not files:
        raise DataError(f"no file below {folder} matches {pattern!r} (data.source, data.pattern): give a pattern such as '*.py' or '*.txt'")
    digest, tokens = hashlib.sha256(f"{FORMAT} {pattern}\n".encode()), 0
    for path in files:
        content = _read(path)
        tokens += len(content) + len(SEPARATOR)
        digest.update(f"{path.relative_to(folder).as_posix()} {hashlib.sha256(content).hexdigest()}\n".encode())
    return Source(tuple(files), tokens, digest.hexdigest())


def pack(files: tuple[Path, ...]) -> Iterator[bytes]:
    """Join the files, each ended by the separator, and cut the stream into shards of equal size (the last may be shorter)."""
    pending = bytearray()
    for path in files:
        pending += _read(path) + SEPARATOR
        while len(pending) >= SHARD_BYTES:
            yield bytes(pending[:SHARD_BYTES])
            del pending[:SHARD_BYTES]
    if pending:
        yield bytes(pending)


def prepare(order: Order, store: Store, events: Events) -> None:
    """Bring the dataset of these files into the bucket, unless it is there already."""
    source = survey(order.folder, order.pattern)

    def progress(shard: int, done: bool, unchanged: bool) -> None:
        events.emit(
            "prepare", files=len(source.files), bytes=source.tokens, shard=shard, shards=source.shards, done=done, unchanged=unchanged
        )

    present = read_manifest(store, order.prefix)
    if present is not None and present.source_fingerprint == source.fingerprint:
        progress(source.shards, done=True, unchanged=True)
        return
    # A reader must never see the old manifest beside new shards.
    store.delete(manifest_key(order.prefix))
    shards = _upload(order, source, store, lambda count: progress(count, done=False, unchanged=False))
    manifest = Manifest(
        name=order.name,
        tokens=source.tokens,
        dtype=DTYPE,
        files=len(source.files),
        source_fingerprint=source.fingerprint,
        shards=tuple(shards),
    )
    store.put(manifest_key(order.prefix), manifest.to_json())
    progress(len(shards), done=True, unchanged=False)


def _upload(order: Order, source: Source, store: Store, progress: Callable[[int], None]) -> list[Shard]:
    """Upload shard after shard and give their manifest entries; shards of a larger predecessor are removed."""
    shards: list[Shard] = []
    for index, content in enumerate(pack(source.files)):
        shard = Shard(name=f"shard-{index:05d}.bin", bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        store.put(f"{order.prefix}/{shard.name}", content)
        shards.append(shard)
        progress(len(shards))
    if sum(shard.bytes for shard in shards) != source.tokens:
        raise DataError(f"the files below {order.folder} changed while they were packed: run the preparation again")
    names = {f"{order.prefix}/{shard.name}" for shard in shards}
    for listed in store.listing(f"{order.prefix}/shard-"):
        if listed.key not in names:
            store.delete(listed.key)
    return shards


def _read(path: Path) -> bytes:
    """Read a file, or say which one cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _order_of(arguments: argparse.Namespace) -> tuple[str, str, Order]:
    """Give run, bucket and order from the run's configuration or from the command line."""
    if arguments.folder is not None:
        if not arguments.name or not arguments.bucket:
            raise ConfigurationError("--folder needs --name and --bucket as well")
        return arguments.name, arguments.bucket, Order(arguments.name, arguments.folder, arguments.pattern, f"datasets/{arguments.name}")
    config = load(arguments.config)
    if config.data.source.startswith("s3://"):
        raise ConfigurationError(f"{arguments.config}: data.source is {config.data.source}: already packed shards need no preparation")
    return config.run, config.data_bucket, Order(config.data.name, Path(config.data.source), config.data.pattern, config.data.prefix)


def main() -> int:
    """Prepare, and turn what a user can mend into one message and an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m training.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=CONFIG_PATH, help="the run's configuration (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="pack this folder instead")
    parser.add_argument("--pattern", default="*", help="which files of the folder (default: %(default)s)")
    parser.add_argument("--name", help="name of the dataset")
    parser.add_argument("--bucket", help="bucket that gets it")
    # Nothing is half done without a manifest, so a signal may end the preparation at once; PID 1 has no default action for it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = parser.parse_args()
    events = Events(arguments.name or "", 1, sys.stdout)
    try:
        events.run, bucket, order = _order_of(arguments)
        prepare(order, Store(bucket), events)
    except StoreError as error:
        events.emit("error", code=PREFLIGHT, message=error.message)
        return PREFLIGHT
    except TrainerError as error:
        events.emit("error", code=error.code, message=error.message)
        return error.code
    return DONE


if __name__ == "__main__":
    sys.exit(main())
