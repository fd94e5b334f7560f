"""Served tables: bytes, AUC lost on MovieLens, latency beside fp32 and TorchRec's int8, and beside the prediction.

Lookups are of 26 tables of 100k x 64, pooling 10, in one process a kind, one thread. All processes take turns, so that
other load on the machine slows all. "fp32" is `EmbeddingBagCollection`, "fused fp32" is `FusedEmbeddingBagCollection`.
``--with-torchrec`` installs TorchRec in a temporary environment.

The part "plans" splits the same tables, in int8, over all GPUs of this machine or over two virtual CPU devices:
table-wise, row-wise and column-wise. Beside each measured call is the latency that the planner predicts. The figures of
the prediction are measured on these devices first, with other tables and batches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import geometric_mean, median, quantiles
from typing import Any

import torch

from benchmarks import Figure, note
from benchmarks.apparatus.environments import TorchRecEnv
from benchmarks.apparatus.model_runs import DIM, EPS, TABLE_LR, Both, Course, untrained
from benchmarks.apparatus.sides import Side
from benchmarks.apparatus.tower_runs import MOVIELENS

TABLES, ROWS, WIDTH, POOLING = 26, 100_000, 64, 10
BATCHES = (1, 64, 1024)
ROUNDS, QUICK_ROUNDS = 21, 5
ROUND_S = 0.1
TRAINED = ("fp32", "fused fp32")
SERVED = ("int8", "int4")
PARTS = ("size", "AUC", "latency", "plans")
TARGETS = {
    "size of int8 over fp32": 0.27,
    "size of int4 over fp32": 0.15,
    "AUC lost by int8": 0.001,
    "AUC lost by int4": 0.005,
}


def figures(*, quick: bool = False, only: Sequence[str] = (), with_torchrec: bool = False) -> list[Figure]:
    """Sizes are counted, AUC is of one training run, latencies are medians of rounds.

    Args:
        quick: fewer rounds.
        only: parts of "size", "AUC", "latency", "plans"; all when left out.
        with_torchrec: times TorchRec's int8 too.

    Raises:
        ValueError: an `only` that no part has in its name.
        PeersMissing: TorchRec cannot be installed beside the torch that is here.
    """
    chosen = [part for part in PARTS if not only or any(asked.lower() in part.lower() for asked in only)]
    if not chosen:
        raise ValueError(f"no part has {list(only)} in its name; there are: {', '.join(PARTS)}")
    found = []
    if "size" in chosen:
        found += sizes()
    if "AUC" in chosen:
        found += accuracy()
    if "latency" in chosen:
        found += latencies(QUICK_ROUNDS if quick else ROUNDS, with_torchrec)
    if "plans" in chosen:
        found += predictions(QUICK_ROUNDS if quick else ROUNDS)
    return found


def predictions(rounds: int) -> list[Figure]:
    """Milliseconds of one call of each plan, beside the predicted ones."""
    from recshard_lab import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        KeyedJaggedTensor,
        ShardingPlan,
        column_wise,
        row_wise,
        shard_for_inference,
        table_wise,
    )
    from recshard_lab.serving.inference import compare_latencies, measure_devices
    from recshard_lab.sharding import construct_module_sharding_plan

    gpus = torch.cuda.device_count()
    devices = [f"cuda:{one}" for one in range(gpus)] if gpus else ["cpu", "cpu"]
    note(f"measuring the figures of {', '.join(devices)} ...")
    topology, ranks = measure_devices(devices, dtype="int8"), range(len(devices))
    tables = [EmbeddingBagConfig(ROWS, WIDTH, f"t{one}", feature_names=[f"f{one}"]) for one in range(TABLES)]
    model = EmbeddingBagCollection(tables)
    schemes = {
        "table-wise": {table.name: table_wise(rank=one % len(ranks)) for one, table in enumerate(tables)},
        "row-wise": {table.name: row_wise() for table in tables},
        "column-wise": {table.name: column_wise(ranks=list(ranks)) for table in tables},
    }
    served = {}
    for name, chosen in schemes.items():
        split = construct_module_sharding_plan(model, chosen, world_size=len(ranks))
        served[name] = shard_for_inference(model, ShardingPlan({"": split}), devices, dtype="int8")
    found, errors = [], []
    for batch in BATCHES:
        draw, bags = torch.Generator().manual_seed(batch), TABLES * batch
        ids, lengths = torch.randint(ROWS, (bags * POOLING,), generator=draw), torch.full((bags,), POOLING)
        features = KeyedJaggedTensor([f"f{one}" for one in range(TABLES)], ids, lengths=lengths).to(devices[0])
        for row in compare_latencies(served, features, topology=topology, calls=rounds).plans:
            beside = {"predicted ms": row.predicted_ms, "predicted / measured": row.ratio, "p90 ms": row.p90_ms}
            name = f"call, batch {batch:,}, {row.plan}, int8 on {row.devices}"
            found.append(Figure(name, row.measured_ms, "ms", beside=beside))
            errors.append(max(row.ratio, 1 / row.ratio))
    found.append(Figure("predicted latency of plans is off by a factor of", geometric_mean(errors), "x"))
    return found


def sizes(rows: int = 1000) -> list[Figure]:
    """Bytes of served rows over those of fp32, without what the kernels pad."""
    from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig, quantize_embeddings

    found = []
    trained = EmbeddingBagCollection([EmbeddingBagConfig(rows, WIDTH, "table", feature_names=["feature"])])
    for kind in SERVED:
        served: Any = quantize_embeddings(trained, kind)
        found.append(Figure(f"size of {kind} over fp32", served.weight_bytes() / (rows * WIDTH * 4), ""))
    return found


def accuracy() -> list[Figure]:
    """A DLRM that was trained on MovieLens, and what its held-out AUC loses."""
    from recshard_lab.data import BatchLoader, build_dataset
    from recshard_lab.embedding import quantize_embeddings
    from recshard_lab.embedding.quantized.quantize import quantization_report
    from recshard_lab.train import batch_loss, evaluate

    course = Course("dlrm", MOVIELENS)
    data: Any = build_dataset(course.data)
    note(f"training a DLRM on {data.train.source} ...")
    model = untrained(course, data.train.features, data.train.num_dense_features)
    tables = [one for name, one in model.named_parameters() if "embedding_bags" in name]
    dense = [one for name, one in model.named_parameters() if "embedding_bags" not in name]
    optimizer: Any = Both(torch.optim.Adagrad(tables, lr=TABLE_LR, eps=EPS), torch.optim.Adam(dense, lr=0.002))
    for _ in range(course.epochs):
        for batch in BatchLoader(data.train, course.batch_size, shuffle=True, seed=0):
            optimizer.zero_grad()
            batch_loss(model(batch.dense_features, batch.sparse_features), batch).backward()
            optimizer.step()
    found = []
    for kind in SERVED:
        served = quantize_embeddings(model, kind)
        report = quantization_report(model, served, {"AUC": lambda one: evaluate(one, data.test).auc})
        before, after = report.scores["AUC"]
        beside = {
            "AUC": before,
            "served": after,
            "max error": max(one.max_error for one in report.tables),
            "size ratio": report.size_ratio,
        }
        about = f"AUC: a DLRM with {DIM} columns, on held-out ratings of: {data.test.source}."
        found.append(Figure(f"AUC lost by {kind}", before - after, "", beside=beside, note=about))
    return found


def latencies(rounds: int, with_torchrec: bool) -> list[Figure]:
    """Microseconds of one call, by batch size."""
    with ExitStack() as stack:
        sides = {
            f"ours, {kind}": (Side("ours", sys.executable, 1, 1, "lookup_worker"), kind) for kind in (*TRAINED, *SERVED)
        }
        if with_torchrec:
            note("creating a temporary environment for TorchRec, which takes about a minute ...")
            theirs = stack.enter_context(TorchRecEnv())
            sides["TorchRec, int8"] = (Side("theirs", theirs.python, 1, 1, "lookup_worker"), "int8")
        for name, (side, kind) in sides.items():
            note(f"building {name} ...")
            stack.enter_context(side)
            side.order({"do": "build", "kind": kind, "tables": TABLES, "rows": ROWS, "dim": WIDTH, "pooling": POOLING})
        found = []
        for batch in BATCHES:
            found += _of_batch({name: side for name, (side, _) in sides.items()}, batch, rounds)
        return found


def _of_batch(sides: dict[str, Side], batch: int, rounds: int) -> list[Figure]:
    counts, taken = {}, {name: [] for name in sides}  # type: ignore[var-annotated]
    for name, side in sides.items():
        warm = side.order({"do": "times", "batch": batch, "count": 10})[0]["seconds"]
        counts[name] = max(3, int(ROUND_S / median(warm)))
    for _ in range(rounds):
        for name, side in sides.items():
            seconds = side.order({"do": "times", "batch": batch, "count": counts[name]})[0]["seconds"]
            taken[name].append(median(seconds))
    found = [
        Figure(
            f"lookup, batch {batch:,}, {name}",
            1e6 * median(times),
            "us",
            beside={"p90 of rounds": 1e6 * quantiles(times, n=10)[-1]},
        )
        for name, times in taken.items()
    ]
    ours = taken["ours, int8"]
    for kind in TRAINED:
        faster = median(fp32 / int8 for fp32, int8 in zip(taken[f"ours, {kind}"], ours, strict=True))
        bound = 1.5 if batch == BATCHES[-1] else None
        name = f"batch {batch:,}: int8 is faster than {kind} by"
        found.append(Figure(name, faster, "x", target=bound, at_most=False))
    if "TorchRec, int8" in taken:
        ratio = median(own / other for own, other in zip(ours, taken["TorchRec, int8"], strict=True))
        found.append(Figure(f"batch {batch:,}: our int8 over TorchRec's", ratio, "x", target=1.0))
    return found
