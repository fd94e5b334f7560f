"""Two memories of a rank: drawn apart, each against its own capacity, predicted beside what ranks really hold."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recshard_lab.lab import measure_plan, views
from recshard_lab.launcher import Ranks
from recshard_lab.planner import Estimate, Workload, estimate
from recshard_lab.sharding import ParameterSharding, Shard, ShardingPlan, Topology
from tests.lab.pictures import boxes, texts
from tests.lab.plans import plan_of, table
from tests.launched import launched

TABLES = [table("movie", 1000), table("user", 400)]
LOAD = Workload(32, 2.0, optimizer="exact_row_wise_adagrad")
GPUS = Topology(2, "cuda", hbm_cap=10**6, ddr_cap=4 * 10**5)


def both_memories() -> ShardingPlan:
    """Of the movies, the first 200 rows on rank 0's device, the others in rank 1's host; users on rank 1's device."""
    movie = [Shard(0, (0, 200), (0, 16)), Shard(1, (200, 1000), (0, 16), "ddr")]
    user = [Shard(1, (0, 400), (0, 16))]
    entries = {"movie": ParameterSharding("row_wise", shards=movie), "user": ParameterSharding("custom", shards=user)}
    return ShardingPlan({"": entries})  # type: ignore[dict-item]


def predicted(topology: Topology = GPUS) -> Estimate:
    return estimate(both_memories(), TABLES, topology, LOAD)


def test_each_memory_has_its_own_picture_capacity_and_numbers() -> None:
    found = predicted()
    weights, states = 800 * 16 * 4, 800 * 4  # row-wise Adagrad: one number a row
    assert found.host_weight_bytes is not None
    assert found.host_weight_bytes.tolist() == [0, weights]
    assert found.host_bytes is not None
    assert found.host_bytes.tolist() == [0, weights + states]
    view = views.memory(found, topology=GPUS)
    assert [panel.title.split(":")[0] for panel in view.chart.panels] == ["HBM", "Host memory"]  # type: ignore[union-attr]
    for name in ("HBM", "Host memory"):
        assert any(words.startswith(name) for words in texts(view.svg))
    assert "in HBM" in view.summary
    assert "in host memory, rank 1, uses 54.4 KB" in view.summary
    bars = boxes(view.svg)
    tall, short = (bars[f"rank 1, predicted\n{name}"] for name in ("weights: 51.2 KB", "optimizer state: 3.2 KB"))
    assert tall.height / short.height == pytest.approx(weights / states, rel=0.02)
    assert next(list(row[:5]) for row in view.numbers.rows if row[0] == "host memory" and row[1] == "1") == [
        "host memory",
        "1",
        "predicted",
        "51.2 KB",
        "3.2 KB",
    ]
    assert len({trace.yaxis for trace in view.figure.data}) == 2


def test_what_does_not_fit_the_hosts_memory_is_said_first() -> None:
    view = views.memory(predicted(replace(GPUS, ddr_cap=60_000)), topology=GPUS)
    assert view.summary.startswith("Does not fit: rank 1 needs 54.4 KB in host memory, it has 51 KB usable")


def test_measured_bytes_of_the_hosts_memory_stand_beside_predicted_ones() -> None:
    found = predicted()
    measured = SimpleNamespace(
        memory_categories=found.memory_categories,
        memory_bytes=found.memory_bytes,
        host_memory_bytes=np.array([[0.0, 0.0], [50_000.0, 4_000.0]]),
    )
    told = [row for row in views.memory(found, measured).numbers.rows if row[0] == "host memory"]
    assert [(row[1], row[2], row[3]) for row in told][2:] == [("1", "predicted", "51.2 KB"), ("1", "counted", "50 KB")]
    measured.host_memory_bytes = np.full((2, 2), np.nan)
    assert "is not a number" in views.memory(found, measured).problem
    measured.host_memory_bytes = np.zeros((3, 2))
    assert "not the same plan" in views.memory(found, measured).problem


ranks = launched(2)


def held(plan_json: str, tables: list[Any], device: str) -> tuple[dict[str, int], dict[str, int]]:
    """What a rank says it holds, where its device is called so: only names are compared, nothing is sent there."""
    import torch

    from recshard_lab import DistributedModelParallel, EmbeddingBagCollection
    from recshard_lab.distributed import EmbeddingBagCollectionSharder

    fused = {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.1}
    model = DistributedModelParallel(
        EmbeddingBagCollection(tables),
        plan=ShardingPlan.from_json(plan_json),
        sharders=[EmbeddingBagCollectionSharder(fused_params=fused)],
    )
    model.device = torch.device(device)
    return model.memory_bytes(), model.host_memory_bytes()


def test_ranks_hold_in_each_memory_what_is_predicted(ranks: Ranks) -> None:
    found = predicted()
    own = found.memory_bytes[:, :2]
    assert found.host_bytes is not None
    assert found.host_weight_bytes is not None
    for rank, (here, there) in enumerate(ranks.run(held, both_memories().to_json(), TABLES, "cuda")):
        assert [here["weights"], here["optimizer_state"]] == own[rank].tolist()
        assert there["weights"] == found.host_weight_bytes[rank]
        assert there["weights"] + there["optimizer_state"] == found.host_bytes[rank]
    for here, there in ranks.run(held, both_memories().to_json(), TABLES, "cpu"):
        assert not any(there.values())  # a CPU's memory is the host's
        assert here["weights"] > 0


def test_cpu_ranks_have_one_memory_which_they_share_and_the_picture_says_so(ranks: Ranks) -> None:
    top = Topology(2, ddr_cap=10**6)
    found = predicted(top)
    measured = measure_plan(ranks, both_memories(), TABLES, LOAD, steps=2)
    assert found.host_bytes is None
    assert measured.host_memory_bytes is None
    np.testing.assert_array_equal(measured.memory_bytes[:, :2], found.memory_bytes[:, :2])
    view = views.memory(found, measured, topology=top)
    told = " ".join(texts(view.svg))
    assert "The 2 CPU ranks of a node share the host's memory: 2 MB, 1 MB per rank." in told
    assert "HBM" not in told


def test_placement_marks_what_lies_in_the_hosts_memory() -> None:
    view = views.placement(both_memories(), TABLES, GPUS)
    assert "Host memory holds 51.2 KB." in view.summary
    assert any("a house: in the host's memory" in words for words in texts(view.svg))
    assert "51.2 KB, host memory" in texts(view.svg)
    assert view.svg.count("<title>in the host's memory</title>".replace("'", "&#x27;")) == 1
    at = view.numbers.heads.index("memory")
    assert [(row[0], row[1], row[at]) for row in view.numbers.rows] == [
        ("0", "movie", "own"),
        ("1", "movie", "host"),
        ("1", "user", "own"),
    ]
    plain = views.placement(plan_of(TABLES, 2, ("row_wise",)), TABLES, GPUS)
    assert "host" not in plain.svg
    assert "memory" not in plain.numbers.heads
