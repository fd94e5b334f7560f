"""Bytes of a parameter server: the formulas beside messages that a small simulation sends and counts."""

import itertools
from collections import Counter

import numpy as np
import pytest

import recshard_lab as rs
from recshard_lab.planner.model.parameter_server import (
    DISTINCT,
    EVERY_ID,
    ROW_WISE,
    TABLE_WISE,
    all_to_all_bytes,
    compare_servers,
    server_bytes,
)
from recshard_lab.sharding import ParameterSharding, ShardingPlan, Topology

ROWS, DIM, LR = 4_000, 8, 0.5


class Network:
    """Counts the bytes of messages between named machines."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()

    def send(self, source: str, target: str, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        size = sum(array.nbytes for array in arrays)
        self.sent[source] += size
        self.received[target] += size
        return arrays


def train(batches: list[np.ndarray], servers: int, dedup: bool) -> tuple[np.ndarray, Network]:
    """One step: rows are pulled, each occurrence of an id has the gradient ``row + 1``, gradients are pushed."""
    net, table = Network(), np.linspace(0, 1, ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)
    pushed = []
    for number, batch in enumerate(batches):
        ids, times = np.unique(batch, return_counts=True) if dedup else (batch, np.ones(len(batch), dtype=np.int64))
        for server in range(servers):
            mine = ids % servers == server
            (keys,) = net.send(f"worker {number}", f"server {server}", ids[mine])
            (rows,) = net.send(f"server {server}", f"worker {number}", table[keys])
            gradients = (rows + 1) * times[mine, None].astype(np.float32)
            pushed.append(net.send(f"worker {number}", f"server {server}", keys, gradients))
    for keys, gradients in pushed:
        np.subtract.at(table, keys, np.float32(LR) * gradients)
    return table, net


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (4, 2), (8, 8), (3, 5)])
def test_the_formulas_are_what_a_simulation_sends(workers: int, servers: int, dedup: bool) -> None:
    draw = np.random.default_rng(1)
    batches = [draw.integers(0, ROWS, 6_000) for _ in range(workers)]
    _, net = train(batches, servers, dedup)
    ids = [len(np.unique(batch)) if dedup else len(batch) for batch in batches]
    found = server_bytes(workers, servers, [float(np.mean(ids))], [DIM])
    by_worker = [(net.sent[f"worker {n}"], net.received[f"worker {n}"]) for n in range(workers)]
    by_server = [(net.sent[f"server {n}"], net.received[f"server {n}"]) for n in range(servers)]
    assert found.total == sum(net.sent.values())
    assert np.mean(by_worker, axis=0).tolist() == pytest.approx([found.worker_sent, found.worker_received])
    assert np.mean(by_server, axis=0).tolist() == pytest.approx([found.server_sent, found.server_received])
    assert np.max(by_server, axis=0) == pytest.approx([found.server_sent, found.server_received], rel=0.1)


def test_the_simulation_trains_as_one_process_does() -> None:
    draw = np.random.default_rng(2)
    batches = [draw.integers(0, 50, 40) for _ in range(3)]
    (one, _), (other, _) = train(batches, 2, dedup=True), train(batches, 1, dedup=False)
    truth = np.linspace(0, 1, ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)
    uses = np.bincount(np.concatenate(batches), minlength=ROWS)[:, None]
    truth = truth - LR * (truth + 1) * uses
    np.testing.assert_allclose(one, truth, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(other, truth, rtol=1e-5, atol=1e-4)


def test_distinct_ids_of_a_comparison_are_those_of_drawn_batches() -> None:
    table = rs.EmbeddingBagConfig(ROWS, DIM, name="t", feature_names=["f"])
    draw = np.random.default_rng(3)
    batches = [draw.integers(0, ROWS, 600 * 10) for _ in range(8)]
    found = compare_servers([table], rs.Workload(600, 10.0), workers=[8], workers_per_server=4)
    for dedup, kind in ((False, EVERY_ID), (True, DISTINCT)):
        _, net = train(batches, 2, dedup)
        megabytes = sum(net.sent[f"worker {n}"] + net.received[f"worker {n}"] for n in range(8)) / 8 / 1e6
        assert found.points[0].megabytes[f"parameter server, {kind}"] == pytest.approx(megabytes, rel=0.01)


def test_the_bytes_of_all_to_all_are_those_of_the_cost_model() -> None:
    tables = [rs.EmbeddingBagConfig(8_000, dim, name=f"t{dim}", feature_names=[f"f{dim}"]) for dim in (16, 64)]
    load = rs.Workload(128, {"f16": 3.0, "f64": 20.0})
    for scheme, ranks in itertools.product(("table_wise", "row_wise"), (2, 4, 8)):
        plan = ShardingPlan({"": {one.name: ParameterSharding(scheme) for one in tables}}).resolved(tables, ranks)  # type: ignore[dict-item]
        by_phase = rs.estimate(plan, tables, Topology(ranks), load).traffic_by_phase
        sent = sum(float(own.sum() - own.trace()) for label, own in by_phase.items() if label != "input_dist/sizes")
        shards = ranks if scheme == "row_wise" else 1
        assert all_to_all_bytes(tables, load, ranks, shards) == pytest.approx(sent, rel=1e-6), (scheme, ranks)


def test_time_is_that_of_the_busier_side_and_of_the_link() -> None:
    """10 ids of 8 bytes and rows of 32 bytes: 800 bytes one after the other; a server has 4 workers."""
    table = rs.EmbeddingBagConfig(ROWS, DIM, name="t", feature_names=["f"])
    load = rs.Workload(10, 1.0)
    slow, fast = (compare_servers([table], load, [4], share, bandwidth=100.0).points[0] for share in (4, 1))
    name = f"parameter server, {EVERY_ID}"
    assert fast.ms[name] == pytest.approx(10 * (2 * 8 + 2 * 32) / 100)
    assert slow.ms[name] == pytest.approx(4 * fast.ms[name])
    assert fast.megabytes == pytest.approx(slow.megabytes)
    assert slow.server_megabytes[name] == pytest.approx(4 * fast.server_megabytes[name])


def test_unpooled_rows_cost_a_parameter_server_long_bags() -> None:
    """One server per worker: short bags are cheaper than partial sums to all ranks, long ones dearer than one sum."""
    table = rs.EmbeddingBagConfig(10_000_000, 64, name="t", feature_names=["f"])
    short, long = (
        compare_servers([table], rs.Workload(512, ids), [128], workers_per_server=1).points[0].ms for ids in (1.0, 50.0)
    )
    server = f"parameter server, {EVERY_ID}"
    assert short[TABLE_WISE] < short[server] < short[ROW_WISE] / 50
    assert long[server] > 30 * long[TABLE_WISE]  # 50 x (2 x 8 + 8 D) bytes beside 50 x 4 + 8 D, for D = 64: 37


def test_a_comparison_prints_its_condition_and_refuses_what_is_no_number() -> None:
    table = rs.EmbeddingBagConfig(ROWS, DIM, name="t", feature_names=["f"])
    found = compare_servers([table], rs.Workload(64, 5.0))
    text = str(found)
    assert "Computed, not measured: 1 server for 4 workers, 64 samples per worker, links of 12.5 GB/s" in " ".join(
        text.split()
    )
    assert len(found.records()) == 4 * 7
    with pytest.raises(ValueError, match=r"workers must be numbers from 1 up, got \[\]\. Fix: workers=\[2, 4\]"):
        compare_servers([table], rs.Workload(64), workers=[])
    with pytest.raises(ValueError, match="bandwidth must be a positive number, got 0"):
        compare_servers([table], rs.Workload(64), bandwidth=0)
