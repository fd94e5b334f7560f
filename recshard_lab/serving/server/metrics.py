"""Counters and histograms in the format of Prometheus, summed over the worker processes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Set for workers, before prometheus_client is imported: each writes its counters to files of this folder."""

SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


class Metrics:
    """What ``GET /metrics`` reports. A process creates one.

    >>> metrics = Metrics()
    >>> metrics.requests.labels("200").inc()
    >>> "recshard_requests_total{status=\\"200\\"} 1.0" in metrics.text().decode()
    True
    """

    def __init__(self) -> None:
        disable_created_metrics()
        own = self._registry = CollectorRegistry()
        self.requests = Counter("recshard_requests", "Answered requests, by status.", ["status"], registry=own)
        self.request_seconds = Histogram(
            "recshard_request_seconds", "Whole request to answer, of answers 200.", buckets=SECONDS, registry=own
        )
        self.queue_seconds = Histogram(
            "recshard_queue_seconds", "Time of a request in the queue.", buckets=SECONDS, registry=own
        )
        self.model_seconds = Histogram(
            "recshard_model_seconds", "Time of one call of the model.", buckets=SECONDS, registry=own
        )
        self.stage_seconds = Histogram(
            "recshard_stage_seconds", "Time of one stage of the model.", ["stage"], buckets=SECONDS, registry=own
        )
        self.batch_samples = Histogram(
            "recshard_batch_samples", "Samples of one call of the model.", buckets=SAMPLES, registry=own
        )
        self.queue = Gauge("recshard_queue_requests", "Requests that wait.", registry=own, multiprocess_mode="livesum")
        self.queue_limit = Gauge(
            "recshard_queue_limit", "Requests that may wait.", registry=own, multiprocess_mode="livesum"
        )
        self.connections = Gauge("recshard_connections", "Open connections.", registry=own, multiprocess_mode="livesum")
        self.buffered = Gauge("recshard_buffered_bytes", "Bodies in memory.", registry=own, multiprocess_mode="livesum")
        self.dropped = Counter(
            "recshard_dropped", "Requests that left the queue before the model.", ["reason"], registry=own
        )
        self.swaps = Counter("recshard_swaps", "New versions, by result.", ["result"], registry=own)
        self.version = Gauge(
            "recshard_version",
            "Processes that serve a version.",
            ["version"],
            registry=own,
            multiprocess_mode="livesum",
        )
        if FOLDER_VARIABLE not in os.environ:
            ProcessCollector(registry=own)

    def text(self) -> bytes:
        """The body of ``GET /metrics``, summed over all workers."""
        if FOLDER_VARIABLE not in os.environ:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        registry.register(_OfWorkers(Path(os.environ[FOLDER_VARIABLE])))
        return generate_latest(registry)


class _OfWorkers(Collector):
    """Sums over the files of all workers.

    prometheus_client (0.26, `mmap_dict.py`) creates a file empty and then extends it, and cannot read an empty one:
    "unpack_from requires a buffer". A worker that starts leaves one for a moment, a worker that is killed there for
    ever.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        files = []
        for path in self._folder.glob("*.db"):
            try:
                if path.stat().st_size:
                    files.append(str(path))
            except FileNotFoundError:  # a gauge of a worker that ended
                continue
        merged: Iterable[Metric] = MultiProcessCollector.merge(files)
        return merged
