"""The Prometheus endpoint of a node. Telling only keeps a number; the text is made when somebody asks, and has only what was ever told."""

import sys
from collections.abc import Iterator
from typing import Any

from training.config import Checkpoint, Metrics

PREFIX = "trainyard_"
INFO = ("run_id", "git_commit", "image_digest", "dataset_version", "config_hash", "world_size", "checkpoint_path")
# Name: label and meaning. What ends in _total is a counter, told as the total, everything else a gauge.
TABLE = {
    "step": ("", "Last step that was done."),
    "loss": ("", "Loss of the last step, nats per token, mean over the global batch."),
    "grad_norm": ("", "Norm of the gradients of the last step, before clipping."),
    "tokens_per_second_per_gpu": ("", "Tokens trained per second and GPU (on CPUs: per process)."),
    "mfu_ratio": ("", "Model FLOPS utilisation, 0 to 1; absent when the peak of the GPU is not known."),
    "step_seconds": ("part", "Seconds of the last step by part: data, forward_backward, optimizer, communication."),
    "checkpoint_seconds": ("", "Seconds from the beginning of the last save until it was durable."),
    "checkpoint_stall_seconds": ("", "Seconds for which the last save stopped the training."),
    "checkpoint_bytes": ("", "Bytes of the last checkpoint."),
    "checkpoint_interval_seconds": ("", "Declared seconds between checkpoints; an interval in steps at the pace of the median step."),
    "last_durable_step": ("", "Step of the newest committed checkpoint."),
    "last_durable_timestamp_seconds": ("", "When the newest checkpoint was committed, Unix time."),
    "resumes_total": ("", "Attempts of this run after its first."),
    "resume_successes_total": ("", "Attempts of this run after its first that went on from a checkpoint."),
    "steps_redone_total": ("", "Steps of this attempt done again because the checkpoint was older."),
    "sigterm_to_durable_seconds": ("", "Seconds from the signal of the eviction until a checkpoint with all steps was durable."),
    "data_wait_seconds_total": ("", "Seconds this attempt has waited for data."),
    "goodput_seconds": ("class", "Seconds of the run by class; they sum to its wall time."),
}


class Exporter:
    """The metrics of one process. Without a port, or before start(), everything works and nobody can ask."""

    def __init__(self, config: Metrics, identity: dict[str, str]) -> None:
        self._config, self._identity = config, identity
        self._values: dict[str, dict[str, float]] = {name: {} for name in TABLE}

    def start(self) -> int | None:
        """Open the endpoint and give its port; None without one. A port that is taken is told on stderr and stops no training."""
        if self._config.port is None:
            return None
        from prometheus_client import CollectorRegistry, start_http_server  # a sixth of a second that only an endpoint needs

        registry = CollectorRegistry()
        registry.register(self)
        try:
            return start_http_server(self._config.port, self._config.host, registry)[0].server_port
        except OSError as error:
            print(f"no metrics: port {self._config.port} of {self._config.host} cannot be opened: {error.strerror}", file=sys.stderr)
            return None

    def tell(self, **values: float | dict[str, float] | None) -> None:
        """Set metrics of TABLE; one with a label by a dict from label to value. None, not known, changes nothing."""
        for name, value in values.items():
            if value is not None:
                self._values[name].update(value if isinstance(value, dict) else {"": value})

    def collect(self) -> Iterator[Any]:
        """Give everything that is known, as prometheus_client wants it."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        info = GaugeMetricFamily(f"{PREFIX}run_info", "What runs; always 1.", labels=INFO)
        info.add_metric([self._identity.get(key, "") for key in INFO], 1)
        yield info
        for name, (label, meaning) in TABLE.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(PREFIX + name, meaning, labels=[label] if label else [])
            for key, value in self._values[name].copy().items():
                family.add_metric([key] if label else [], value)
            if family.samples:
                yield family


def interval(checkpoint: Checkpoint, step_seconds: float | None) -> float | None:
    """Give the seconds between checkpoints that the run file declares; None until the pace of a step is known."""
    by_steps = checkpoint.every_steps and step_seconds and checkpoint.every_steps * step_seconds
    return min((seconds for seconds in (checkpoint.every_seconds, by_steps) if seconds), default=None)
