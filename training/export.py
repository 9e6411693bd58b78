"""Writes the weights of a checkpoint as safetensors, for whoever wants the model without the trainer.

Takes the newest good checkpoint, or the newest one when none is good, and verifies it first. `config.json` is written last and names
the SHA-256 of every file beside it. There must be memory for two of the files, not for the model.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from training.catalog import MARK, Catalog, CheckpointManifest, DamagedCheckpointError
from training.config import RunConfig, load
from training.errors import DONE, ConfigurationError, NoUsableCheckpointError
from training.launch import CONFIG_PATH
from training.models import MODELS
from training.store import Folder, Store, place_of

FILE_BYTES = 5_000_000_000


def divide(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Put tensors, given with their bytes, into files of at most `limit` bytes, named as Hugging Face names them."""
    groups, room = [], 0
    for name, size in sizes.items():
        if size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    return dict(zip(names if len(groups) > 1 else ["model.safetensors"], groups, strict=True))


def export(config: RunConfig, step: int | None, where: str, limit: int = FILE_BYTES) -> CheckpointManifest:
    """Export a checkpoint of the run; NoUsableCheckpointError when there is none that can be."""
    catalog = Catalog(place_of(config), config.run)
    chosen = step or next(iter(catalog.good() or catalog.committed()), None)
    if chosen is None:
        raise NoUsableCheckpointError(f"the run {config.run} has no checkpoint at {catalog.place.uri(catalog.prefix)}")
    bucket, _, prefix = where.removeprefix("s3://").partition("/")
    target, prefix = (Store(bucket), f"{prefix.strip('/')}/") if where.startswith("s3://") else (Folder(where), "")
    if target.listing(prefix):
        raise ConfigurationError(f"--to {where}: there is something already; name an empty place")
    try:
        manifest = catalog.verified(chosen)
        files = {name: _put(target, prefix + name, content) for name, content in _files(catalog, manifest, limit)}
    except DamagedCheckpointError as error:
        raise NoUsableCheckpointError(f"{catalog.uri(chosen)} cannot be exported: {error}") from None
    model, tokenizer, mark = (
        manifest.config["model"],
        manifest.geometry["tokenizer"],
        json.loads(catalog.place.get(catalog.step_folder(chosen) + MARK)),
    )
    about = {"model": model, "shape": asdict(MODELS[model]), "tokenizer": tokenizer, "run": config.run, "step": chosen}
    about |= {"validation_loss": manifest.validation_loss, "checkpoint": catalog.uri(chosen), "checkpoint_sha256": mark["manifest_sha256"]}
    _put(target, f"{prefix}config.json", _json(about | {"files": files}))
    return manifest


def _files(catalog: Catalog, manifest: CheckpointManifest, limit: int) -> Iterator[tuple[str, bytes]]:
    """Read the weights back file by file; several files get an index."""
    from safetensors.torch import save

    from training.prove import Weights  # torch takes seconds to load, and a mistake should not wait for it

    weights = Weights(catalog, manifest)
    files = divide(weights.sizes, limit)
    for file, names in files.items():
        yield file, save(weights.read(names), {"format": "pt"})
    if len(files) > 1:
        where = {name: file for file, names in files.items() for name in names}
        yield "model.safetensors.index.json", _json({"metadata": {"total_size": sum(weights.sizes.values())}, "weight_map": where})


def _put(target: Store | Folder, key: str, content: bytes) -> str:
    """Write a file and give its SHA-256."""
    target.put(key, content)
    return hashlib.sha256(content).hexdigest()


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def main() -> int:
    """Export, and say where."""
    parser = argparse.ArgumentParser(prog="python -m training export", description=__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG_PATH, help="the run's configuration (default: %(default)s)")
    parser.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest good one)")
    parser.add_argument("--to", required=True, metavar="DIR|s3://BUCKET/PREFIX", help="where nothing is yet")
    arguments = parser.parse_args()
    manifest = export(load(arguments.config), arguments.step, arguments.to)
    print(f"step {manifest.step} of the run {manifest.run} is at {arguments.to}")
    return DONE
