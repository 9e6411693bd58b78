"""What exactly ran: the same few strings in the manifest of a checkpoint, in the metrics and in the logs."""

import hashlib
import json
import os

import torch
from torch.cuda import nccl

from training.config import RunConfig
from training.dataset import Manifest
from training.work import Order

# Names, places and limits: what is computed does not depend on them.
INCIDENTAL = ("run", "bucket", "checkpoint", "eviction", "preflight", "metrics", "grace_seconds", "hang_seconds", "accept_changes")
NOT_HASHED = {**dict.fromkeys(INCIDENTAL, True), "data": {"cache_folder", "cache_bytes"}, "train": {"log_every"}}


def identity(config: RunConfig, order: Order, dataset: Manifest, gigabytes_per_second: float | None = None) -> dict[str, str]:
    """Describe this attempt; the bandwidth is the preflight's. What is not known is empty."""
    cuda = torch.cuda.is_available()
    return {
        "run_id": config.run,
        "attempt": str(order.attempt),
        "git_commit": os.environ.get("TRAINYARD_GIT_SHA", ""),
        "image_digest": os.environ.get("TRAINYARD_IMAGE", "").rpartition("@")[2],
        "dataset_version": dataset.sha256,
        "config_hash": config_hash(config),
        "world_size": str(config.processes),
        "checkpoint_path": f"{config.checkpoint.folder or 's3://' + config.bucket}/runs/{config.run}/checkpoints",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, nccl.version())) if cuda else "",
        "gpu": torch.cuda.get_device_name() if cuda else "",
        "preflight_gigabytes_per_second": "" if gigabytes_per_second is None else f"{gigabytes_per_second:.3f}",
    }


def config_hash(config: RunConfig) -> str:
    """Give the SHA-256 of what a run computes, whatever it is called and wherever it saves."""
    content = config.model_dump(mode="json", exclude=NOT_HASHED)
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
