"""Published step times of recommendation models beside the planner's predictions for the same steps.

`published.json` has the points: the model, the machine, the step, the published figure and its source. A point counts
only if its page states enough to rebuild the step. The planner's cost model predicts each point with the figures of its
machine's preset. No figure was fitted to a point.

The errors are over all points, and over those within the cost model's scope: fused lookups, with the optimizer in
backward or plain SGD. TensorFlow's sparse Adagrad sorts, adds and updates in separate operators per table.

TorchRec's steps are predicted 1.9 to 2.6 times too short. The host bounds most of them. Its launches and its loader are
counted and timed on the loop itself (``loops`` in the file). The rest is unexplained: no page states the host's time
per operator on those machines, and a figure fitted to these points would predict nothing.

``python -m benchmarks.published`` records the ratio predicted / published of each point in published.json. A test
compares predictions with the recorded ratios.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import Figure
from recshard_lab.embedding import EmbeddingBagConfig, EmbeddingConfig
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner import PHASES, EmbeddingShardingPlanner, Workload
from recshard_lab.planner.sweep.mlperf_dense import dlrm_dcn_dense, dlrm_dcn_launches, linear_traffic
from recshard_lab.sharding import ParameterConstraints, Shard, Topology

FILE = Path(__file__).with_suffix(".json")
GRAPH_LAUNCHES = 2
"""Launches of a dense part that is two CUDA graphs: the layers with their all-reduce, and the optimizer."""
MARGIN = 0.1
"""How far a ratio may move from the recorded one, as a share of it."""
TRAIN_SAMPLES = 4_195_197_692
"""Samples of one epoch of MLPerf's DLRM-DCNv2: ``train_samples`` in every log."""
COLUMN_SLICE = 1280 * 2**20
"""Most elements of a column slice of the synthetic models: ``--column_slice_threshold`` in their README."""

_MEAN, _WORST = (f"predicted against published step times, {kind}" for kind in ("mean error", "worst factor"))
_ALL, _FUSED = "all steps", "fused kernels"
TARGETS = {f"{what}, {of}": bound for of in (_ALL, _FUSED) for what, bound in ((_MEAN, 25.0), (_WORST, 2.0))}


@dataclass(frozen=True)
class Point:
    """A published step and its prediction.

    Args:
        name: executor, model and machine.
        published_ms, predicted_ms: of one training step.
        fused: whether the executor is within the cost model's scope.
        source: page and table of the published figure.
    """

    name: str
    published_ms: float
    predicted_ms: float
    fused: bool
    source: str

    @property
    def ratio(self) -> float:
        """Predicted / published.

        >>> Point("a step", 4.0, 3.0, True, "").ratio
        0.75
        """
        return self.predicted_ms / self.published_ms


def figures(only: list[str] | None = None) -> list[Figure]:
    """One row per point, then the errors of all points, of those in the cost model's scope, and of each executor.

    Args:
        only: texts; points whose name contains one of them.
    """
    found = [point(entry) for entry in content()["points"] if not only or any(text in entry["name"] for text in only)]
    rows = [
        Figure(
            f"[{number}] {one.name}",
            one.predicted_ms,
            "ms",
            beside={"published ms": one.published_ms, "error %": 100 * (one.ratio - 1)},
            note=f"[{number}] {one.source}",
        )
        for number, one in enumerate(found, 1)
    ]
    groups = {_ALL: [one.ratio for one in found], _FUSED: [one.ratio for one in found if one.fused]}
    for one in found:
        executor = one.name.partition(",")[0] + ("" if one.fused else " with sparse Adagrad")
        groups.setdefault(executor, []).append(one.ratio)
    for name, ratios in groups.items():
        if ratios:
            rows.append(Figure(f"{_MEAN}, {name}", mean_error(ratios), "%", beside={"points": len(ratios)}))
            rows.append(Figure(f"{_WORST}, {name}", max(max(ratio, 1 / ratio) for ratio in ratios), "x"))
    return rows


def mean_error(ratios: list[float]) -> float:
    """Geometric mean of ``max(r, 1 / r)`` of ratios predicted / published, minus 1, in %.

    >>> round(mean_error([1.25, 0.8]), 6)
    25.0
    """
    return 100 * float(np.expm1(np.abs(np.log(ratios)).mean()))


def point(entry: dict[str, Any]) -> Point:
    """An entry of published.json with its prediction."""
    return Point(
        entry["name"],
        published_ms(entry),
        predicted_ms(entry),
        entry["executor"] == "fused",
        entry["source"],
    )


def published_ms(entry: dict[str, Any]) -> float:
    """ms of one step, from published ms, samples per second, or an MLPerf log.

    A log states when evaluations begin and end, and the share of an epoch trained by then. The step is the time between
    evaluations divided by the number of steps in it.
    """
    ((kind, value),) = entry["published"].items()
    batch = entry["batch_size"] * entry["ranks"]
    if kind == "ms":
        return float(value)
    if kind == "samples_per_s":
        return 1e3 * batch / value
    trained_ms = sum(end - begin for begin, end in zip(value["eval_stop_ms"], value["eval_start_ms"][1:], strict=False))
    steps = (value["epoch"][-1] - value["epoch"][0]) * TRAIN_SAMPLES / batch
    return float(trained_ms / steps)


def predicted_ms(entry: dict[str, Any]) -> float:
    """ms of one step, predicted for the tables, step, machine and plan of a point."""
    model = content()["models"][entry["model"]]
    tables, ids = tables_of(model, entry.get("sequence", False))
    dense, loop = dense_of(model), loop_of(entry)
    workload = Workload(
        batch_size=entry["batch_size"],
        pooling_factors=ids,
        zipf_alpha=model["zipf_alpha"],
        optimizer=entry["optimizer"],
        dense_parameters=dense.parameters,
        dense_flops_per_sample=float(dense.flops),
        dense_traffic_per_sample=float(dense.traffic * (2 if entry["precision"] == "fp16" else 4)),
        dense_features=model["dense_features"],
        dense_launches=GRAPH_LAUNCHES if "cuda_graphs" in entry else loop.get("dense_launches", dense.launches),
        codecs=entry.get("codecs", "fp32"),
        pipeline=entry["pipeline"],
        index_dedup=entry.get("index_dedup", False),
        matmul_precision="highest" if entry["precision"] == "fp32" else "high",
    )
    constraints = layout(entry.get("layout", ""), tables, entry["ranks"])
    planner = EmbeddingShardingPlanner(topology_of(entry), workload=workload, constraints=constraints)
    found = planner.plan_tables(tables, explain=False).estimate
    unused = found.ms[:, PHASES.index("input_dist")].max() if entry.get("ids_in_place") else 0.0
    return found.step_ms - float(unused)


def topology_of(entry: dict[str, Any]) -> Topology:
    """The machine of a point: its preset.

    Tensor cores multiply FP16 twice as fast as TF32 (data sheets of A100 and H100). A step that is one CUDA graph
    costs the host no launches. A loop whose loader runs on the training thread costs it the time of that loader.
    """
    load_ms = loop_of(entry).get("load_ms", {}).get(str(entry["batch_size"]), 0.0)
    top = Topology.preset(entry["preset"], world_size=entry["ranks"], step_ms=load_ms)
    if entry["precision"] == "fp16":
        top = replace(top, tf32_flops_per_ms=2 * top.tf32_flops_per_ms)
    return replace(top, launch_ms=0.0, host_ms=0.0, sync_ms=0.0) if entry.get("cuda_graphs") == "step" else top


def loop_of(entry: dict[str, Any]) -> dict[str, Any]:
    """What the training loop of a point does on the host beyond the counted layers; empty if nothing is known."""
    found: dict[str, Any] = content()["loops"][entry["loop"]] if "loop" in entry else {}
    return found


def tables_of(model: dict[str, Any], sequence: bool = False) -> tuple[list[BaseEmbeddingConfig], dict[str, float]]:
    """A model's tables, and the ids per sample of each feature.

    Args:
        model: entry of ``models``: ``groups`` of [tables, ids of each feature, rows, columns], or ``rows`` of tables
            with one feature, one id (or ``ids``) and ``columns`` each.
        sequence: whether every id keeps its vector (a sequence collection).
    """
    if "groups" in model:
        groups = [(counts, rows, cols) for number, counts, rows, cols in model["groups"] for _ in range(number)]
    else:
        counts = model.get("ids", [1] * len(model["rows"]))
        groups = [([count], rows, model["columns"]) for count, rows in zip(counts, model["rows"], strict=True)]
    kind = EmbeddingConfig if sequence else EmbeddingBagConfig
    tables: list[BaseEmbeddingConfig] = []
    ids: dict[str, float] = {}
    for number, (counts, rows, cols) in enumerate(groups):
        features = [f"f{number}_{at}" for at in range(len(counts))]
        ids |= dict(zip(features, map(float, counts), strict=True))
        tables.append(kind(name=f"t{number}", num_embeddings=rows, embedding_dim=cols, feature_names=features))
    return tables, ids


@dataclass(frozen=True)
class Dense:
    """The dense part of a step.

    Args:
        parameters: in all.
        flops: operations for a sample, forward and backward.
        traffic: numbers that are read and written for a sample.
        launches: operators of a step.
    """

    parameters: int
    flops: int
    traffic: int
    launches: int


def dense_of(model: dict[str, Any]) -> Dense:
    """The dense part by formula, counted as in `planner.sweep.mlperf_dense`.

    ``interaction`` "dcn" is MLPerf's; "dot" multiplies all pairs of the vectors; "pool" averages every ``stride``
    numbers of the concatenated vectors.
    """
    if model["interaction"] == "dcn":
        cost, launched = dlrm_dcn_dense(), sum(dlrm_dcn_launches().values())
        return Dense(cost.parameters, cost.forward_flops + cost.backward_flops, cost.traffic, launched)
    tables, ids = tables_of(model)
    bottom = (model["dense_features"], *model.get("bottom", []))
    if model["interaction"] == "dot":
        vectors, cols = len(ids) + 1, model["columns"]
        products, pairs, wide = vectors**2, vectors * (vectors - 1) // 2, vectors * cols
        width, flops, launched = pairs + cols, 3 * 2 * products * cols, 15
        # cat, product, gather of pairs, cat; backward two products, scatter of pairs, sum and copy of gradients
        traffic = 13 * wide + 7 * products + 2 * pairs + 2 * width + cols
    else:
        wide = sum(table.embedding_dim * table.num_features() for table in tables)
        width, flops, launched = -(-wide // model["stride"]) + model["dense_features"], 0, 2 + 2
        traffic = 4 * (wide + width)  # cat and pooling, forward and backward
    sizes = [*pairwise(bottom), *pairwise((width, *model["top"]))]
    weights, biases = sum(i * o for i, o in sizes), sum(o for _, o in sizes)
    operators = 2 * len(sizes) - 1 + 4 * len(sizes) - 2  # forward with activations; backward: dW, dx, db, activation
    loss, optimizer, reduced = 5, 6, 4 * len(sizes) + 1
    return Dense(
        weights + biases,
        6 * weights + 2 * biases + flops,
        linear_traffic(bottom) + linear_traffic((width, *model["top"])) + traffic,
        operators + launched + loss + optimizer + reduced,
    )


def layout(name: str, tables: list[BaseEmbeddingConfig], ranks: int) -> dict[str, ParameterConstraints]:
    """The published placement as constraints; the planner chooses what a page leaves open.

    Args:
        name: schemes joined by "|", or "by_memory": distributed-embeddings' strategy memory_balanced. It sorts the
            column slices by size and deals them to the ranks, forwards and backwards in turn. Empty for any plan.
    """
    if name != "by_memory":
        wanted = name.split("|") if name else None
        return {table.name: ParameterConstraints(sharding_types=wanted) for table in tables} if wanted else {}
    slices = []
    for at, table in enumerate(tables):
        elements, parts = table.num_embeddings * table.embedding_dim, 1
        while elements / parts > COLUMN_SLICE and parts < min(ranks, table.embedding_dim):
            parts *= 2
        edges = np.linspace(0, table.embedding_dim, parts + 1).astype(int).tolist()
        slices += [(elements // parts, at, edge) for edge in pairwise(edges)]
    slices.sort(reverse=True)
    shards: dict[int, list[Shard]] = {}
    for number, (_, at, cols) in enumerate(slices):
        place = number % (2 * ranks)
        rank = place if place < ranks else 2 * ranks - 1 - place
        shards.setdefault(at, []).append(Shard(rank, (0, tables[at].num_embeddings), cols))
    return {tables[at].name: ParameterConstraints(shards=own) for at, own in shards.items()}


@lru_cache
def content() -> dict[str, Any]:
    """published.json."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def record() -> None:
    """Writes the ratio predicted / published of every point into published.json."""
    found = {one.name: round(one.ratio, 3) for one in map(point, content()["points"])}
    kept, _, _ = FILE.read_text().partition(' "recorded": ')
    FILE.write_text(f'{kept} "recorded": {json.dumps(found, indent=1)}\n}}\n')


if __name__ == "__main__":
    record()
