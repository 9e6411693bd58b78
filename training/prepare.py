"""Packs text files into shards of byte tokens and uploads them. Idempotent: the same sources are packed once.

In a pod:   python -m training.prepare --config /etc/trainyard/run.json
            python -m training.prepare --config /etc/trainyard/run.json --warm    fills the cache of a packed dataset instead
On a host:  python -m training.prepare --folder PATH --pattern '*.py' --name NAME --bucket BUCKET
"""

import argparse
import hashlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from training.cache import Cache, cache_folder
from training.config import RunConfig, load
from training.dataset import Cursor, Manifest, Sampler, Shard, check_fits, find_dataset, manifest_key, read_manifest, split
from training.errors import DONE, PREFLIGHT, ConfigurationError, DataError, StoreError, TrainerError
from training.events import Events
from training.models import BYTES, MODELS
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


def prepare(name: str, source: Source, store: Store, prefix: str, events: Events) -> None:
    """Bring the dataset of these files into the bucket, unless it is there already."""
    total = -(-source.tokens // SHARD_BYTES)

    def progress(shard: int, done: bool = False, unchanged: bool = False) -> None:
        events.emit("prepare", files=len(source.files), bytes=source.tokens, shard=shard, shards=total, done=done, unchanged=unchanged)

    try:
        present = read_manifest(store, prefix)
    except DataError:  # another version of this program wrote it, or it is damaged: it is replaced
        present = None
    if present is not None and present.source_fingerprint == source.fingerprint:
        return progress(total, done=True, unchanged=True)
    # A reader must never see the old manifest beside new shards.
    store.delete(manifest_key(prefix))
    shards = []
    for index, content in enumerate(pack(source.files)):
        digest = hashlib.sha256(content).hexdigest()
        shards.append(Shard(name=f"shard-{index:05d}.bin", bytes=len(content), tokens=len(content), sha256=digest))
        store.put(f"{prefix}/{shards[-1].name}", content)
        progress(len(shards))
    if sum(shard.tokens for shard in shards) != source.tokens:
        raise DataError("the files of the dataset changed while they were packed: run the preparation again")
    for listed in store.listing(f"{prefix}/shard-"):  # of a larger predecessor
        if listed.key not in {f"{prefix}/{shard.name}" for shard in shards}:
            store.delete(listed.key)
    described = {"name": name, "tokenizer": "bytes", "vocabulary": BYTES, "dtype": "uint8", "source_fingerprint": source.fingerprint}
    manifest = Manifest.model_validate({**described, "tokens": source.tokens, "files": len(source.files), "shards": shards})
    store.put(manifest_key(prefix), manifest.to_json())
    return progress(total, done=True)


def warm(config: RunConfig, events: Events) -> None:
    """Fill the cache with the shards of the dataset in the order of the first epoch, as many as data.cache_bytes allows."""
    data = config.data
    if data.cache_folder is None:
        raise ConfigurationError("there is no data.cache_folder to fill: name a path that the pods of the training mount as well")
    store = Store(config.data_bucket)
    manifest = find_dataset(store, data.prefix)
    check_fits(manifest, MODELS[config.model], config)
    windows, held_out = split(manifest, config.train.sequence_length, data.validation_windows)
    order = [place.shard for place in held_out] + Sampler(windows, data.shuffle_shards).shards(Cursor(config.train.seed))
    wanted = list(dict.fromkeys(order))
    totals = list(accumulate(manifest.shards[shard].bytes for shard in wanted))
    fitting = sum(total <= (data.cache_bytes or totals[-1]) for total in totals)
    cache = Cache(store, data.prefix, manifest, cache_folder(config), data.cache_bytes)
    for count in range(1, fitting + 1):
        cache.open(wanted[count - 1])
        events.emit("warm", shard=count, shards=fitting, bytes=totals[count - 1], done=count == fitting)


def _read(path: Path) -> bytes:
    """Read a file, or say which one cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _run(arguments: argparse.Namespace, events: Events) -> None:
    """Do what the command line asks for, with the run's configuration or without."""
    if arguments.folder is not None:
        if not arguments.name or not arguments.bucket:
            raise ConfigurationError("--folder needs --name and --bucket as well")
        source, store = survey(arguments.folder, arguments.pattern), Store(arguments.bucket)
        return prepare(arguments.name, source, store, f"datasets/{arguments.name}", events)
    config = load(arguments.config)
    events.run, data = config.run, config.data
    if arguments.warm:
        return warm(config, events)
    if data.source.startswith("s3://"):
        raise ConfigurationError(f"{arguments.config}: data.source is {data.source}: already packed shards need no preparation")
    return prepare(data.name, survey(Path(data.source), data.pattern), Store(config.data_bucket), data.prefix, events)


def main() -> int:
    """Prepare, and turn what a user can mend into one message and an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m training.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=CONFIG_PATH, help="the run's configuration (default: %(default)s)")
    parser.add_argument("--warm", action="store_true", help="fill the cache of the run's dataset (data.cache_folder)")
    parser.add_argument("--folder", type=Path, help="pack this folder instead")
    parser.add_argument("--pattern", default="*", help="which files of the folder (default: %(default)s)")
    parser.add_argument("--name", help="name of the dataset")
    parser.add_argument("--bucket", help="bucket that gets it")
    # Nothing is half done without a manifest, so a signal may end the preparation at once; PID 1 has no default action for it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = parser.parse_args()
    events = Events(arguments.name or "", 1, sys.stdout)
    try:
        _run(arguments, events)
    except StoreError as error:
        events.emit("error", code=PREFLIGHT, message=error.message)
        return PREFLIGHT
    except TrainerError as error:
        events.emit("error", code=error.code, message=error.message)
        return error.code
    return DONE


if __name__ == "__main__":
    sys.exit(main())
