"""`load_test` against a real server."""

import pytest

from recshard_lab.serving import LoadTest, Server, load_test
from tests.serving.server.stub import batch


@pytest.mark.nightly
def test_every_request_of_every_connection_is_timed(server: Server) -> None:
    before = _answered(server)
    found = load_test(server, batch(), connections=3, requests=5)
    assert _answered(server) - before == 3 * (5 + 1)  # one request of each connection is not timed
    assert found.connections == 3
    assert len(found.latencies_ms) == 15
    assert list(found.latencies_ms) == sorted(found.latencies_ms)
    assert found.latencies_ms[-1] <= 1e3 * found.seconds
    assert found.per_second == 15 / found.seconds


def test_percentiles_of_known_latencies() -> None:
    found = LoadTest(1, 2.0, tuple(float(ms) for ms in range(1, 101)))
    assert (found.percentile(0), found.percentile(50), found.percentile(99), found.percentile(100)) == (1, 51, 100, 100)
    with pytest.raises(ValueError, match="percent must be 0 to 100, got 101"):
        found.percentile(101)


def _answered(server: Server) -> int:
    with server.client() as client:
        metrics = client.metrics()
    return int(sum(count for name, count in metrics.items() if name.startswith("recshard_requests_total")))
