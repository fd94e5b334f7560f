"""`load_test`: latencies of a server under several connections at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

from recshard_lab.serving.batch import Batch
from recshard_lab.serving.server.running import Server


@dataclass(frozen=True)
class LoadTest:
    """The result of `load_test`.

    Attributes:
        connections: number of connections, each with one request at a time.
        seconds: from the first request to the last answer.
        latencies_ms: milliseconds of each request, sorted.

    >>> LoadTest(connections=2, seconds=0.5, latencies_ms=(1.0, 2.0, 3.0, 9.0))
    LoadTest(2 connections: 8 answers/s, p50 3.0 ms, p99 9.0 ms)
    """

    connections: int
    seconds: float
    latencies_ms: tuple[float, ...]

    @property
    def per_second(self) -> float:
        """Answers per second."""
        return len(self.latencies_ms) / self.seconds

    def percentile(self, percent: float) -> float:
        """The latency in milliseconds that `percent` of the requests do not exceed.

        Raises:
            ValueError: a percentage outside 0 to 100.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"percent must be 0 to 100, got {percent}")
        last = len(self.latencies_ms) - 1
        return self.latencies_ms[min(last, int(len(self.latencies_ms) * percent / 100))]

    def __repr__(self) -> str:
        times = ", ".join(f"p{percent} {self.percentile(percent):.1f} ms" for percent in (50, 99))
        return f"LoadTest({self.connections} connections: {self.per_second:,.0f} answers/s, {times})"


def load_test(server: Server, batch: Batch, *, connections: int = 1, requests: int = 100) -> LoadTest:
    """Sends the same batch over several connections at once, and times each request.

    The client is Python code in threads of this process. On few cores it limits the rate itself; `recshard bench serve`
    uses a compiled client.

    Args:
        server: a running server.
        batch: the samples of each request.
        connections: number of connections. Each sends its next request after its last answer.
        requests: number of requests of each connection, after one that is not timed.

    Raises:
        ValueError: `connections` or `requests` below 1.
        ServeError: the server refused a request.
    """
    if connections < 1 or requests < 1:
        raise ValueError(f"connections and requests must be at least 1, got {connections} and {requests}")

    def send(_: int) -> tuple[float, list[float], float]:
        with server.client() as client:
            client.predict_batch(batch)
            at = [perf_counter()]
            for _ in range(requests):
                client.predict_batch(batch)
                at.append(perf_counter())
        return at[0], [1e3 * (end - start) for start, end in pairwise(at)], at[-1]

    with ThreadPoolExecutor(connections) as pool:
        done = list(pool.map(send, range(connections)))
    seconds = max(end for _, _, end in done) - min(start for start, _, _ in done)
    return LoadTest(connections, seconds, tuple(sorted(ms for _, times, _ in done for ms in times)))
