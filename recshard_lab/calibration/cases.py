"""Random models and plans that are run to calibrate, and others to judge the calibration by.

A `Model` is tables and a workload; under one plan of it, it is a `Case`. Which are drawn follows from the seed alone.
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
_MOST_BYTES = 96e6  # of a model's weights, of which data parallelism and the optimizer make a multiple
MOST_NUMBERS = 6e6  # read in one rank's lookups, ids x columns, so that a step is a matter of milliseconds


@dataclass(frozen=True)
class Model:
    """What a step trains.

    Attributes:
        name: tells the draw.
        tables: all pooled.
        workload: batch of one rank, ids a bag, skew, optimizer.
    """

    name: str
    tables: tuple[EmbeddingBagConfig, ...]
    workload: Workload


@dataclass(frozen=True)
class Case:
    """A model under a plan, of which `layout` is the name."""

    model: Model
    layout: str
    plan: ShardingPlan


def draw_model(seed: Sequence[int], optimizer: str | None = None, most_numbers: float = MOST_NUMBERS) -> Model:
    """A model: 1 to 26 tables of 300 to 500k rows and 8 to 128 columns, batches of 128 to 4096, 1 to 20 ids a bag.

    Sizes are log-uniform, each table has its own; ids are uniform or as skewed as Zipf 1.2. Models whose step would
    take a second or fill the memory get smaller batches, and fewer rows.

    Args:
        seed: numbers.
        optimizer: of it; one of SGD, row-wise Adagrad and Adagrad when left out.
        most_numbers: that one rank's lookups read, ids x columns; larger batches are cut down to it.
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


def draw_cases(
    model: Model, layouts: Sequence[str], world_size: int, local_world_size: int | None = None
) -> list[Case]:
    """The model under plans of these layouts: every table as its scheme cuts it when nothing else is said.

    Args:
        model: the tables.
        layouts: schemes by name; "mixed" draws one of the first four of `LAYOUTS` for each table.
        world_size: ranks.
        local_world_size: of a node; all of them when left out.
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
