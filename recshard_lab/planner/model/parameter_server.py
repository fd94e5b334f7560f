"""Network bytes of a parameter server, beside those of all-to-all.

S servers store the tables, rows spread by a hash of their ids. W workers train. In each step, a worker pulls the rows
of its batch and pushes their gradients. Its batch has u ids of k bytes for a table of D columns: every id, or each
distinct id once. Rows and gradients are fp32::

    pull    worker -> servers   k u        ids
            servers -> worker   4 D u      rows, not pooled
    push    worker -> servers   (k + 4 D) u    ids and gradients

- **A worker** sends ``(2 k + 4 D) u`` and receives ``4 D u``.
- **A server** gets its part, 1 / S, of every worker's messages. It receives ``W (2 k + 4 D) u / S`` and sends
  ``W 4 D u / S``.
- **The network** carries ``W (2 k + 8 D) u``.
- **Time**: a link carries both directions at once, and the phases follow each other: ids, rows, gradients. Each waits
  for the busier side, a worker or a server. The step takes ``(2 k + 8 D) u max(1, W / S) / bandwidth``.

Servers are separate machines: no byte stays on a worker. In an all-to-all each rank is worker and server, and pools
rows before it sends them: the bytes of table-wise and row-wise are in `sharding/schemes/__init__.py`. A rank of those
sends 1 / W of the bytes, and receives as many. With S = W and distinct ids, a parameter server differs from
all-to-all by unpooled rows alone. It wins where bags are short and row-wise would send a partial sum to every rank.

Shape letters: W workers, S servers, D columns, B samples of a worker, L ids per bag.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recshard_lab.arguments import checks_arguments
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.workload import Workload, table_loads
from recshard_lab.text_table import Printable, TextTable

WORKERS = (2, 4, 8, 16, 32, 64, 128)
ID_BYTES = 8  # ids of a parameter server are hash keys
EVERY_ID, DISTINCT = "every id", "distinct ids"
TABLE_WISE, ROW_WISE = "all-to-all, table-wise", "all-to-all, row-wise"


@dataclass(frozen=True)
class ServerBytes:
    """Bytes of one step of a parameter server.

    Attributes:
        worker_sent, worker_received: of one worker.
        server_sent, server_received: of one server.
        total: of all workers together.
        serial: bytes of the pull and the push that the busier side takes one after the other.
    """

    worker_sent: float
    worker_received: float
    server_sent: float
    server_received: float
    total: float
    serial: float


def server_bytes(
    workers: int, servers: int, ids: Sequence[float], dims: Sequence[int], id_bytes: int = ID_BYTES
) -> ServerBytes:
    """The formulas of this module.

    Args:
        workers: W.
        servers: S.
        ids: u of each table, per worker.
        dims: D of each table.
        id_bytes: k.

    >>> found = server_bytes(workers=4, servers=2, ids=[100], dims=[8], id_bytes=8)
    >>> found.worker_sent, found.server_received, found.total
    (4800.0, 9600.0, 32000.0)
    """
    count = float(sum(ids))
    rows = 4.0 * float(np.dot(ids, dims))
    sent, shared = 2 * id_bytes * count + rows, workers / servers
    busier = max(1.0, shared)
    return ServerBytes(
        sent, rows, shared * rows, shared * sent, workers * (sent + rows), busier * (2 * id_bytes * count + 2 * rows)
    )


def all_to_all_bytes(
    tables: Sequence[BaseEmbeddingConfig], workload: Workload, ranks: int, row_shards: int = 1
) -> float:
    """Bytes between `ranks` ranks in a step, all tables in as many row shards: ``4 (W - 1) B (L + R + 2 R D)``.

    Args:
        row_shards: R; 1 is table-wise, `ranks` is row-wise.
    """
    loads = table_loads(tables, ranks, workload)
    per_bag = loads.bags * row_shards * (1 + 2 * loads.cols)
    return 4.0 * (ranks - 1) * float((loads.ids + per_bag).sum())


@dataclass(frozen=True)
class ServerPoint:
    """One number of workers.

    Attributes:
        workers: W; servers: S.
        megabytes: architecture -> MB that a worker sends and receives in a step.
        server_megabytes: the same of a server; parameter servers alone.
        ms: architecture -> milliseconds on links of the comparison's bandwidth.
    """

    workers: int
    servers: int
    megabytes: dict[str, float]
    server_megabytes: dict[str, float]
    ms: dict[str, float]


@dataclass(frozen=True)
class ServerComparison(Printable):
    """Network bytes and times of a parameter server and of all-to-all; `print` it.

    Attributes:
        points: by number of workers.
        servers: the number of servers in words.
        bandwidth: bytes per ms of each link, in each direction.
        batch_size: samples of a worker.
    """

    points: tuple[ServerPoint, ...]
    servers: str
    bandwidth: float
    batch_size: int

    @property
    def lines(self) -> dict[str, tuple[list[float], list[float]]]:
        """Architecture -> numbers of workers, and milliseconds."""
        names = self.points[0].ms if self.points else {}
        workers = [float(point.workers) for point in self.points]
        return {name: (workers, [point.ms[name] for point in self.points]) for name in names}

    def records(self) -> list[dict[str, Any]]:
        """One dict per number of workers and architecture, numbers unrounded."""
        return [
            {
                "workers": point.workers,
                "architecture": name,
                "servers": point.servers if name in point.server_megabytes else None,
                "worker_megabytes": point.megabytes[name],
                "server_megabytes": point.server_megabytes.get(name),
                "ms": ms,
            }
            for point in self.points
            for name, ms in point.ms.items()
        ]

    @property
    def numbers(self) -> TextTable:
        """One row per number of workers."""
        names = list(self.points[0].ms) if self.points else []
        heads = ["workers", "servers", *(f"{name}, {unit}" for name in names for unit in ("MB", "ms"))]
        rows = []
        for point in self.points:
            cells = [f"{number:,.4g}" for name in names for number in (point.megabytes[name], point.ms[name])]
            rows.append([f"{point.workers:,}", f"{point.servers:,}", *cells])
        return TextTable(heads, rows)

    def parts(self) -> list[str | TextTable]:
        return [
            f"Computed, not measured: {self.servers}, {self.batch_size:,} samples per worker, links of "
            f"{self.bandwidth / 1e6:g} GB/s in each direction. MB are sent and received by one worker in a step.",
            self.numbers,
        ]


@checks_arguments
def compare_servers(
    tables: Sequence[BaseEmbeddingConfig],
    workload: Workload,
    workers: Sequence[int] = WORKERS,
    workers_per_server: float = 4.0,
    bandwidth: float = 12.5e6,
    id_bytes: int = ID_BYTES,
) -> ServerComparison:
    """A parameter server beside table-wise and row-wise all-to-all, by number of workers.

    Args:
        tables: pooled tables.
        workload: the training step. Its skew determines the distinct ids of a worker's batch.
        workers: numbers W.
        workers_per_server: W / S; at least one server.
        bandwidth: bytes per ms of each link, in each direction. Default: 12.5 GB/s, 100 Gbit/s.
        id_bytes: bytes of an id that a parameter server sends.

    Raises:
        ValueError: no workers; a number that is not positive.

    >>> tables = [BaseEmbeddingConfig(name="t", num_embeddings=1000, embedding_dim=64, feature_names=["f"])]
    >>> found = compare_servers(tables, Workload(512, 10.0), workers=[2, 64])
    >>> [round(point.megabytes["parameter server, every id"], 2) for point in found.points]
    [2.7, 2.7]
    """
    if not workers or min(workers) < 1:
        raise ValueError(f"workers must be numbers from 1 up, got {list(workers)!r:.80}. Fix: workers=[2, 4]")
    for name, value in (
        ("workers_per_server", workers_per_server),
        ("bandwidth", bandwidth),
        ("id_bytes", id_bytes),
    ):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a positive number, got {value!r}. Fix: {name}=8")
    loads = table_loads(tables, 1, workload)
    dims = loads.cols.astype(int).tolist()
    points = []
    for count in workers:
        servers = max(1, round(count / workers_per_server))
        mega: dict[str, float] = {}
        server: dict[str, float] = {}
        ms: dict[str, float] = {}
        for kind, ids in ((EVERY_ID, loads.ids), (DISTINCT, loads.touched)):
            found, name = server_bytes(count, servers, ids.tolist(), dims, id_bytes), f"parameter server, {kind}"
            mega[name] = (found.worker_sent + found.worker_received) / 1e6
            server[name] = (found.server_sent + found.server_received) / 1e6
            ms[name] = found.serial / bandwidth
        for name, shards in ((TABLE_WISE, 1), (ROW_WISE, count)):
            each = all_to_all_bytes(tables, workload, count, shards) / count
            mega[name], ms[name] = 2 * each / 1e6, each / bandwidth
        points.append(ServerPoint(count, servers, mega, server, ms))
    words = f"1 server for {workers_per_server:g} workers"
    return ServerComparison(tuple(points), words, bandwidth, workload.batch_size)
