"""What a case is, and how its number decides it."""

import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from recshard_lab import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    ParameterSharding,
    PoolingType,
    Shard,
    ShardingPlan,
    Topology,
)
from recshard_lab.comm import CommType, make_codec
from recshard_lab.distributed.step.lookup import choose_kernels
from recshard_lab.embedding import EmbOptimType, OptimizerSpec
from recshard_lab.embedding.kernels import available
from recshard_lab.sharding import ROUTES
from recshard_lab.sharding.schemes import scheme_named, scheme_names

NODES = {1: 1, 2: 2, 3: 1, 4: 2}  # world size -> virtual nodes
BETAS = ("adam", "lamb", "partial")


@dataclass(frozen=True)
class Case:
    """A model, three plans in turn, and two steps under each.

    Attributes:
        tables: keyword arguments of each config.
        fused: settings of the optimizer.
        plans: as JSON.
        sizes: step -> rank -> samples.
        number: the seed of batches, weights and losses.
        codecs: of rows, of gradients.
        bound: extra memory of the moves.
    """

    world: int
    number: int
    tables: tuple[dict[str, Any], ...]
    fused: dict[str, Any]
    plans: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    sequence: bool
    weighted: bool
    weight_gradients: bool
    codecs: tuple[CommType, CommType]
    backend: str | None
    bound: int | None

    @property
    def nodes(self) -> int:
        return NODES[self.world]

    def configs(self) -> list[Any]:
        kind: Any = EmbeddingConfig if self.sequence else EmbeddingBagConfig
        return [kind(**table) for table in self.tables]

    def shardings(self, table: str) -> list[ParameterSharding]:
        """Of one table, under each plan."""
        return [ShardingPlan.from_json(plan).tables()[table] for plan in self.plans]

    def command(self) -> str:
        return f"python -m tests.fuzz {self.world} {self.number}"


def draw(world: int, number: int) -> Case:
    """The case of a number; the first of its tries that the kernels can serve."""
    dice = random.Random(f"{world} {number}")
    while True:
        case = _try(dice, world, number)
        if _served(case):
            return case


def _try(dice: random.Random, world: int, number: int) -> Case:
    sequence = dice.random() < 0.3
    coded = dice.random() < 0.3
    codecs = (dice.choice(list(CommType)), dice.choice(list(CommType))) if coded else (CommType.FP32, CommType.FP32)
    tables = tuple(_table(dice, n, sequence) for n in range(dice.randint(1, 4)))
    if len(tables) > 1 and dice.random() < 0.3:  # one feature that two tables read
        tables[-1]["feature_names"].append(tables[0]["feature_names"][0])
    kernels = [_kernel(dice, table) for table in tables]
    topology = Topology(world, local_world_size=world // NODES[world])
    adds = not sequence and all(make_codec(kind).adds_on_wire for kind in codecs)
    routes = [route for route in ROUTES if route == "direct" or (not sequence and (adds or route != "reduce_scatter"))]
    plans = []
    for _ in range(3):
        entries = {
            table["name"]: _sharding(dice, table, topology, kernel, routes)
            for table, kernel in zip(tables, kernels, strict=True)
        }
        plans.append(ShardingPlan({"": entries}).to_json())  # type: ignore[dict-item]
    weighted = not sequence and dice.random() < 0.5
    return Case(
        world=world,
        number=number,
        tables=tables,
        fused=_fused(dice),
        plans=tuple(plans),
        sizes=tuple(tuple(dice.choice([0, 1, 2, 5]) for _ in range(world)) for _ in range(6)),
        sequence=sequence,
        weighted=weighted,
        weight_gradients=weighted and dice.random() < 0.5,
        codecs=codecs,
        backend=dice.choice([None, None, *available()]),
        bound=dice.choice([None, None, 1 << 14]),
    )


def _table(dice: random.Random, number: int, sequence: bool) -> dict[str, Any]:
    table = {
        "name": f"t{number}",
        "num_embeddings": dice.choice([1, 2, 3, 7, 30, 100]),
        "embedding_dim": dice.choice([1, 4, 6, 8, 16]),
        "feature_names": [f"t{number}f{k}" for k in range(dice.randint(1, 2))],
        "data_type": dice.choice([DataType.FP32] * 3 + [DataType.FP64, DataType.FP16, DataType.BF16]),
    }
    if not sequence:
        table["pooling"] = dice.choice([PoolingType.SUM, PoolingType.MEAN])
    return table


def _kernel(dice: random.Random, table: dict[str, Any]) -> str:
    kinds = ["fused", "fused", "fused", "fused_uvm", "tiers"]
    if table["data_type"] in (DataType.FP32, DataType.FP64):
        kinds.append("dense")
    return dice.choice(kinds)


def _fused(dice: random.Random) -> dict[str, Any]:
    kind = dice.choice(list(EmbOptimType))
    made: dict[str, Any] = {"optimizer": kind.value, "learning_rate": 0.05, "eps": dice.choice([1e-8, 1e-3])}
    if kind.value.startswith(BETAS):
        made |= {"beta1": 0.8, "beta2": 0.95}
    if kind is EmbOptimType.LARS_SGD:
        made |= {"momentum": 0.7, "eta": 0.3}
    if dice.random() < 0.3:
        made["weight_decay"] = 0.1
    return made


def _sharding(
    dice: random.Random, table: dict[str, Any], topology: Topology, kernel: str, routes: list[str]
) -> ParameterSharding:
    """A scheme's default, a tiling cut both ways, or row shards of which some are on every rank."""
    world, rows, cols = topology.world_size, table["num_embeddings"], table["embedding_dim"]
    name = dice.choice([*scheme_names(), "custom", "custom", "hot"])
    if name == "hot":
        shards = []
        for stripe in _cut(dice, rows):
            everywhere = dice.random() < 0.5
            holders = range(world) if everywhere else [dice.randrange(world)]
            shards += [Shard(rank, stripe, (0, cols)) for rank in holders]
        dice.shuffle(shards)
    elif name == "custom":
        shards, rows_first = [], dice.random() < 0.5
        for outer in _cut(dice, rows if rows_first else cols):
            for inner in _cut(dice, cols if rows_first else rows):
                rect = (outer, inner) if rows_first else (inner, outer)
                shards.append(Shard(dice.randrange(world), *rect))
    else:
        shards = list(scheme_named(name).default(EmbeddingBagConfig(**table), topology, None).shards)
    if kernel == "tiers":
        shards = [replace(own, tier=dice.choice(["hbm", "ddr"])) for own in shards]
    kernel = "fused" if kernel == "tiers" else kernel
    name = "custom" if name == "hot" else name
    whole = ParameterSharding(name, kernel, shards=shards)
    return replace(whole, route="direct" if whole.replicated else dice.choice(routes))


def _cut(dice: random.Random, size: int) -> list[tuple[int, int]]:
    places = sorted(dice.sample(range(1, size), min(size - 1, dice.randint(0, 3))))
    return list(pairwise([0, *places, size]))


def _served(case: Case) -> bool:
    spec = OptimizerSpec.from_fused_params(case.fused)
    try:
        for plan in case.plans:
            entries = ShardingPlan.from_json(plan).tables()
            choose_kernels(
                case.configs(),
                [entries[table["name"]] for table in case.tables],
                [spec] * len(case.tables),
                pooled=not case.sequence,
                weighted=case.weighted,
                device=torch.device("cpu"),
                backend=case.backend,
            )
    except ValueError:
        return False
    return True
