"""Random models and plans: those that calibration runs, and those that judge it. The seed determines them.

A `Model` is tables and a workload. A `Case` is a model under a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recshard_lab.embedding.configs import EmbeddingBagConfig
from recshard_lab.planner import Workload
from recshard_lab.sharding import ShardingPlan, Topology, scheme_named

LAYOUTS = ("table_wise", "row_wise", "column_wise", "data_parallel", "mixed")
MAIN_OPTIMIZERS = ("exact_sgd", "exact_row_wise_adagrad", "exact_adagrad")
_MOST_BYTES = 96e6  # of a model's weights, which replicas and the optimizer multiply
MOST_NUMBERS = 6e6  # ids x columns of one rank's lookups, so that a step takes milliseconds


@dataclass(frozen=True)
class Model:
    """Tables and a workload.

    Attributes:
        name: of the draw.
        tables: all pooled.
        workload: batch of one rank, ids a bag, skew, optimizer.
    """

    name: str
    tables: tuple[EmbeddingBagConfig, ...]
    workload: Workload


@dataclass(frozen=True)
class Case:
    """A model under a plan with the name `layout`."""

    model: Model
    layout: str
    plan: ShardingPlan


def draw_model(seed: Sequence[int], optimizer: str | None = None, most_numbers: float = MOST_NUMBERS) -> Model:
    """A model: 1 to 26 tables of 300 to 500k rows and 8 to 128 columns, batches of 128 to 4096, 1 to 20 ids a bag.

    Sizes are log-uniform and differ by table. Ids are uniform or Zipf-distributed with an exponent up to 1.2. Models
    whose step would take a second or fill the memory get smaller batches and fewer rows.

    Args:
        seed: numbers.
        optimizer: default: SGD, row-wise Adagrad or Adagrad, drawn.
        most_numbers: ids x columns of one rank's lookups; larger batches are reduced to it.
    """
    rng = np.random.default_rng(list(seed))
    count = int(np.exp(rng.uniform(0, np.log(26.99))))
    rows = np.exp(rng.uniform(np.log(300), np.log(500e3), count))
    dims = rng.choice([8, 16, 32, 64, 128], count) if rng.random() < 0.5 else np.full(count, rng.choice([16, 32, 64]))
    pooling = np.exp(rng.uniform(0, np.log(20), count)).round(1) if rng.random() < 0.7 else np.ones(count)
    alphas = rng.choice([0.0, 0.7, 1.05, 1.2], count)
    batch = int(2 ** rng.uniform(7, 12))
    batch = max(64, int(batch * min(1.0, most_numbers / (batch * float((pooling * dims).sum())))))
    rows *= min(1.0, _MOST_BYTES / (4 * float((rows * dims).sum())))
    drawn, name = str(rng.choice(MAIN_OPTIMIZERS)), "_".join(map(str, seed))
    tables = tuple(
        EmbeddingBagConfig(
            name=f"t{name}_{i}",
            num_embeddings=max(100, int(rows[i])),
            embedding_dim=int(dims[i]),
            feature_names=[f"f{i}"],
        )
        for i in range(count)
    )
    workload = Workload(
        batch_size=batch,
        pooling_factors={f"f{i}": float(pooling[i]) for i in range(count)},
        zipf_alpha={tables[i].name: float(alphas[i]) for i in range(count)},
        optimizer=optimizer or drawn,
    )
    return Model(name, tables, workload)


def lookup_case(optimizer: str, world_size: int, count: int, cols: int, bag: int, rows: int) -> Case:
    """A lookup that was timed alone (`operators.py`) as a case: one table on each rank, uniform ids.

    Args:
        optimizer: of it.
        world_size: ranks, each of which looks up the ids of all.
        count, cols, bag, rows: ids, columns, ids a bag and rows of each rank's lookup.
    """
    topology = Topology(world_size)
    tables = tuple(
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, embedding_dim=cols, feature_names=[f"f{i}"])
        for i in range(world_size)
    )
    scheme = scheme_named("table_wise")
    plan = {table.name: scheme.default(table, topology, [rank]) for rank, table in enumerate(tables)}
    batch = max(1, round(count / bag / world_size))
    model = Model(
        f"{optimizer}_{cols}_{rows}", tables, Workload(batch, count / batch / world_size, optimizer=optimizer)
    )
    return Case(model, "table_wise", ShardingPlan({"": plan}))  # type: ignore[dict-item]


def draw_cases(
    model: Model, layouts: Sequence[str], world_size: int, local_world_size: int | None = None
) -> list[Case]:
    """The model under plans of these layouts. Every table is sharded by its scheme's default.

    Args:
        model: the tables.
        layouts: schemes by name; "mixed" draws one of the first four of `LAYOUTS` for each table.
        world_size: ranks.
        local_world_size: ranks of a node. Default: all.
    """
    rng = np.random.default_rng([len(model.tables), model.workload.batch_size, model.tables[0].num_embeddings])
    topology = Topology(world_size, local_world_size=local_world_size or world_size)
    cases = []
    for layout in layouts:
        entries = {}
        for table in model.tables:
            scheme = str(rng.choice(LAYOUTS[:-1])) if layout == "mixed" else layout
            entries[table.name] = scheme_named(scheme).default(table, topology)
        cases.append(Case(model, layout, ShardingPlan({"": entries})))  # type: ignore[dict-item]
    return cases
