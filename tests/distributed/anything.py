"""Whole lives of sharded models that hypothesis draws: from the registries, so that a new entry is covered at once.

A life: a collection is sharded by one plan, trains, moves to another plan while it lives, and trains on. Schemes,
routes, kernels, optimizers, number formats and codecs are those that are registered; tilings are also drawn by hand.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from hypothesis import strategies as st

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
from recshard_lab.embedding import EmbOptimType, OptimizerSpec, WeightDecayMode
from recshard_lab.embedding.inputs import POLICIES
from recshard_lab.embedding.kernels import TORCH_DTYPES, available, kernel_named
from recshard_lab.embedding.optimizers.rules import RULES
from recshard_lab.sharding import ROUTES
from recshard_lab.sharding.schemes import scheme_named, scheme_names
from tests.distributed import cases
from tests.distributed.jobs import Bags, Inverse
from tests.embedding.lookups import can

NODES = {1: 1, 2: 2, 3: 1, 4: 2}  # world size -> virtual nodes


@dataclass
class Life:
    """What a model is and what it goes through.

    Attributes:
        tables: keyword arguments of each config.
        fused: for each table, the settings of the optimizer in its backward.
        plans: before and after the move, as JSON.
        steps: step -> rank -> bags; a rank's features come in an order of its own.
        inverse: step -> rank -> how its bags make samples; None for a rank whose batch is not variable.
        first: how many steps come before the move.
        bound: extra memory allowed in the move.
    """

    tables: list[dict[str, Any]]
    fused: list[dict[str, Any]]
    plans: tuple[str, str]
    steps: list[list[Bags]]
    inverse: list[list[Inverse | None]]
    first: int
    backend: str | None = None
    sequence: bool = False
    weighted: bool = False
    policy: str = "error"
    codecs: tuple[CommType, CommType] = (CommType.FP32, CommType.FP32)
    ids_dtype: torch.dtype = torch.int64
    bound: int | None = None
    seed: int = 0
    curve: float = field(default=0.1)

    def configs(self) -> list[Any]:
        kind: Any = EmbeddingConfig if self.sequence else EmbeddingBagConfig
        return [kind(**table) for table in self.tables]

    def dense(self) -> list[bool]:
        """Which tables a torch optimizer steps."""
        shardings = ShardingPlan.from_json(self.plans[0]).tables()
        return [shardings[table["name"]].compute_kernel == "dense" for table in self.tables]

    def coded(self) -> bool:
        return any(kind is not CommType.FP32 for kind in self.codecs)


@st.composite
def fused_params(draw: Any, calm: bool, plain: bool, backend: str) -> dict[str, Any]:
    """Any optimizer with any of what it honours; ``calm`` ones answer a change of the gradient by as much."""
    known = [kind for kind in EmbOptimType if can(kernel_named(backend), OptimizerSpec(kind))]
    kind = EmbOptimType.EXACT_SGD if calm else draw(st.sampled_from(known))
    rule = RULES[kind]
    # a large eps: where gradients nearly cancel, Adam would blow their rounding up to whole steps
    given: dict[str, Any] = {"optimizer": kind.value, "learning_rate": 0.05, "eps": 0.01}
    if "eta" in rule.settings:
        given["eta"] = 0.5
    if calm or plain:
        return given
    if "beta2" in rule.settings and draw(st.booleans()):
        given |= {"beta1": 0.8, "beta2": 0.95}
    decay = draw(st.sampled_from([None, None, "default", *WeightDecayMode]))
    if decay is not None and decay is not WeightDecayMode.NONE:
        given["weight_decay"] = 0.1
        if decay != "default" and not (rule.decays_inside and decay is WeightDecayMode.L2):
            given["weight_decay_mode"] = decay.name
    if draw(st.integers(0, 3)) == 0:
        given |= {"gradient_clipping": True, "max_gradient": 0.5}
    if draw(st.integers(0, 3)) == 0:
        given["max_norm"] = 0.6
    if draw(st.integers(0, 3)) == 0:
        given["check_gradients"] = True
    return given


@st.composite
def shardings(
    draw: Any, table: dict[str, Any], topology: Topology, kernel: str, routes: Sequence[str]
) -> ParameterSharding:
    """Any proposal of any scheme, on any ranks; or a tiling that no scheme proposes."""
    config, world = EmbeddingBagConfig(**table), topology.world_size
    name = draw(st.sampled_from([*scheme_names(), "custom", "custom"]))
    proposals = [] if name == "custom" else list(islice(scheme_named(name).propose(config, topology), 16))
    if proposals:
        proposal = draw(st.sampled_from(proposals))
        if proposal.assignments:
            ranks = draw(st.sampled_from(proposal.assignments))
        else:
            ranks = [draw(st.integers(0, world - 1)) for _ in proposal.rects]
        made = [Shard(rank, *rect) for rank, rect in zip(ranks, proposal.rects, strict=True)]
    else:
        tiling = draw(cases.tilings(table, world))
        name, made = tiling.sharding_type, list(tiling.shards)
    route = "direct" if ParameterSharding(name, shards=made).replicated else draw(st.sampled_from(routes))
    return ParameterSharding(name, kernel, shards=made, route=route)


@st.composite
def table_lists(draw: Any, sequence: bool, plain: bool) -> list[dict[str, Any]]:
    """One to four tables of any size and number format; some read one another's features."""
    formats = [DataType.FP32] if plain else [DataType.FP32, DataType.FP32, DataType.FP32, *TORCH_DTYPES]
    tables: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 4))):
        features = [f"t{number}f{k}" for k in range(draw(st.integers(1, 2)))]
        if tables and draw(st.integers(0, 3)) == 0:
            features.append(tables[0]["feature_names"][0])
        table = {
            "name": f"t{number}",
            "num_embeddings": draw(st.sampled_from([1, 2, 3, 7, 30])),
            "embedding_dim": draw(st.sampled_from([4, 8, 32] if plain else [1, 4, 6, 8, 32])),
            "feature_names": features,
            "data_type": draw(st.sampled_from(formats)),
        }
        if not sequence:
            table["pooling"] = draw(st.sampled_from([PoolingType.SUM, PoolingType.MEAN]))
        tables.append(table)
    return tables


def draw_bags(generator: random.Random, tables: list[dict[str, Any]], samples: int, stray: int) -> Bags:
    """Bags with duplicates, both ends of every table, whole features without an id, and maybe ids that are no rows."""
    rows: dict[str, int] = {}
    for table in tables:
        for name in table["feature_names"]:
            rows[name] = min(rows.get(name, 1 << 30), table["num_embeddings"])
    bags: Bags = {}
    for name in generator.sample([*rows, "nobody reads this"], len(rows) + 1):
        last = rows.get(name, 5) - 1
        choices = [0, last, generator.randint(0, last)]
        wrong = [-1, -stray, last + 30, stray] if stray else choices
        absent = generator.random() < 0.15
        sizes = [0 if absent else generator.choice([0, 0, 1, 2, 5]) for _ in range(samples)]
        bags[name] = [
            [generator.choice(wrong if generator.random() < 0.2 else choices) for _ in range(size)] for size in sizes
        ]
    return bags


@st.composite
def lives(draw: Any, world_size: int) -> Life:
    """Anything that is not refused by name; half of them plain enough for the fastest kernels."""
    plain, backend = draw(st.booleans()), draw(st.sampled_from(available()))
    topology = Topology(world_size, local_world_size=world_size // NODES[world_size])
    sequence = draw(st.integers(0, 3)) == 0
    kinds = st.sampled_from(CommType) if draw(st.integers(0, 2)) == 0 else st.just(CommType.FP32)
    codecs = (draw(kinds), draw(kinds))
    coded = any(kind is not CommType.FP32 for kind in codecs)
    adds = all(make_codec(kind).adds_on_wire for kind in codecs)
    routes = [route for route in ROUTES if route == "direct" or (not sequence and (adds or route != "reduce_scatter"))]
    tables = draw(table_lists(sequence, plain))
    fused = [draw(fused_params(coded, plain, backend)) for _ in tables]
    exact = [not plain and table["data_type"] in (DataType.FP32, DataType.FP64) for table in tables]
    kernels = [draw(st.sampled_from(["fused", "fused", "fused", "dense"])) if own else "fused" for own in exact]
    plans = []
    for _ in range(2):
        entries = {
            table["name"]: draw(shardings(table, topology, kernel, routes))
            for table, kernel in zip(tables, kernels, strict=True)
        }
        plans.append(ShardingPlan({"": entries}).to_json())  # type: ignore[dict-item]
    policy = draw(st.sampled_from(["error", "error", *POLICIES]))
    ids_dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    variable = draw(st.integers(0, 3)) == 0
    seed = draw(st.integers(0, 10**6))
    generator = random.Random(seed)
    steps, inverse = [], []
    number_of_steps = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    stray = 0 if policy == "error" else 2**40 if ids_dtype is torch.int64 else 2**30
    for _ in range(sum(number_of_steps)):
        sizes = [draw(st.integers(0, 4)) for _ in range(world_size)]
        steps.append([draw_bags(generator, tables, size, stray) for size in sizes])
        made: list[Inverse | None] = [None] * world_size
        if variable:
            made = list(cases.random_inverses(generator.random(), [steps[-1]])[0])  # type: ignore[arg-type]
            for rank, bags in enumerate(steps[-1]):
                if generator.random() < 0.2:  # a rank whose batch happens not to be variable
                    longest = max(len(own) for own in bags.values())
                    steps[-1][rank] = {key: own + [[]] * (longest - len(own)) for key, own in bags.items()}
                    made[rank] = None
        inverse.append(made)
    life = Life(
        tables=tables,
        fused=fused,
        plans=(plans[0], plans[1]),
        steps=steps,
        inverse=inverse,
        first=number_of_steps[0],
        sequence=sequence,
        weighted=not sequence and draw(st.booleans()),
        policy=policy,
        codecs=codecs,
        ids_dtype=ids_dtype,
        bound=draw(st.sampled_from([None, None, 1 << 14])),
        seed=seed,
        curve=0.0 if coded else 0.1,
    )
    life.backend = draw(st.sampled_from([None, backend])) if serves(life, backend) else None
    return life


def serves(life: Life, backend: str) -> bool:
    """Whether a kernel can do every table under both plans."""
    specs = [OptimizerSpec.from_fused_params(given) for given in life.fused]
    try:
        for plan in life.plans:
            entries = ShardingPlan.from_json(plan).tables()
            choose_kernels(
                life.configs(),
                [entries[table["name"]] for table in life.tables],
                specs,
                pooled=not life.sequence,
                weighted=life.weighted,
                device=torch.device("cpu"),
                backend=backend,
            )
    except ValueError:
        return False
    return True
