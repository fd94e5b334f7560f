"""What ranks run in the tests of errors on one rank: a step of the library raises there, and nowhere else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ParameterSharding,
    Shard,
    ShardingPlan,
    Topology,
    row_wise,
)
from recshard_lab.comm import CommType, QCommsConfig, get_qcomm_codecs_registry
from recshard_lab.distributed import DMPCollection, EmbeddingBagCollectionSharder, get_default_sharders, shard
from recshard_lab.distributed.state.checkpoint import load_checkpoint, save_checkpoint
from recshard_lab.distributed.state.pretrained import load_pretrained
from tests.distributed import state_jobs
from tests.distributed.jobs import attempted

ROWS, DIM = 24, 8
FAULT = "no memory left, says the test"


def tables(module: str) -> list[EmbeddingBagConfig]:
    """Two tables, of which the second is on the dense kernel under `plan`."""
    return [
        EmbeddingBagConfig(name=f"{module}{n}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"{module}{n}"])
        for n in range(2)
    ]


class Two(nn.Module):
    """Two collections and a dense layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one = EmbeddingBagCollection(tables("a"))
        self.two = EmbeddingBagCollection(tables("b"))
        self.over = nn.Linear(4 * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = [getattr(self, name)(features).values() for name in ("one", "two")]
        return self.over(torch.cat(rows, 1)).sum()


def plan(scheme: str, dense: bool = True, **more: Any) -> ShardingPlan:
    """Every table under one scheme; the second of each collection on the dense kernel."""
    return ShardingPlan(
        {
            path: {
                f"{module}{n}": ParameterSharding(scheme, "dense" if n and dense else "fused", **more) for n in range(2)
            }
            for path, module in (("one", "a"), ("two", "b"))
        }  # type: ignore[dict-item]
    )


def batch(step: int) -> KeyedJaggedTensor:
    """Ids of this rank's four samples."""
    generator = torch.Generator().manual_seed(17 * step + torch.distributed.get_rank())
    keys = ["a0", "a1", "b0", "b1"]
    return KeyedJaggedTensor(
        keys, torch.randint(ROWS, (32,), generator=generator), lengths=torch.full((16,), 2, dtype=torch.int64)
    )


def build(
    groups: int | None = None, scheme: str = "row_wise"
) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    """A model, in sharding groups of so many ranks if asked, and the optimizer of its dense part."""
    sharders = [EmbeddingBagCollectionSharder({"optimizer": "adam", "learning_rate": 0.01})]
    if groups is None:
        dmp = DistributedModelParallel(Two(), plan=plan(scheme), sharders=sharders)
    else:
        world = torch.distributed.group.WORLD
        dmp = DMPCollection(
            Two(), "cpu", plan(scheme), torch.distributed.get_world_size(), groups, world, sharders=sharders
        )
    return dmp, torch.optim.Adam(dmp.dense_parameters(), lr=0.01)


def train(dmp: DistributedModelParallel, dense: torch.optim.Optimizer, first: int, steps: int) -> None:
    """Some steps; the gradients of the last one stay."""
    for step in range(first, first + steps):
        dense.zero_grad()
        dmp(batch(step)).backward()
        dense.step()


def everything(dmp: DistributedModelParallel, dense: torch.optim.Optimizer) -> dict[str, Tensor]:
    """This rank's weights, fused states, gradients and dense optimizer states."""
    found = {}
    for path, collection in dmp.collections.items():
        for name, shards in collection.table_shards().items():
            for part in shards.parts():
                found |= {f"{path}/{name}/{part.name}/{n}": m.clone() for n, m in shards.matrices(part).items()}
    for n, parameter in enumerate(own for group in dense.param_groups for own in group["params"]):
        found[f"parameter {n}"] = parameter.detach().clone()
        if parameter.grad is not None:
            found[f"gradient {n}"] = parameter.grad.clone()
        found |= {f"state {n}/{key}": value.clone() for key, value in dense.state[parameter].items()}
    return found


@contextmanager
def failing(
    owner: Any, name: str, rank: int, call: int = 0, error: Callable[[str], Exception] = MemoryError
) -> Iterator[list[int]]:
    """A method or function raises on one rank, at one of its calls (negative: at all); the others never."""
    usual, calls = getattr(owner, name), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if torch.distributed.get_rank() == rank and calls[0] - 1 in (call, *([calls[0] - 1] if call < 0 else [])):
            raise error(FAULT)
        return usual(*args, **kwargs)

    setattr(owner, name, wrapped)
    try:
        yield calls
    finally:
        setattr(owner, name, usual)


def owner_of(where: str) -> tuple[Any, str]:
    """``"reshard:move"`` -> the module `recshard_lab.distributed.state.moves` and "move"; classes by a further dot."""
    import importlib

    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(f"recshard_lab.{module}")
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    return owner, name


def reshard_failing(where: str, call: int, bound: int | None, groups: int | None, size: int | None) -> tuple[Any, ...]:
    """A reshard in which one step raises on rank 1.

    Returns:
        The error, how often the step ran, what differs from before, what differs from a model that nobody touched after
        two more steps, and after a reshard that succeeds and a step.
    """
    dmp, dense = build(groups)
    twin, twin_dense = build(groups)
    for model, optimizer in ((dmp, dense), (twin, twin_dense)):
        train(model, optimizer, 0, 2)
        if size is not None:
            model.sync(optimizers=[optimizer])
    before = everything(dmp, dense)
    more = {} if size is None else {"sharding_group_size": size}
    target = plan("column_wise") if size is None else plan("table_wise", ranks=[0])

    def reshard() -> Any:
        return dmp.reshard(target, max_extra_bytes=bound, optimizers=[dense], **more)

    with failing(*owner_of(where), rank=1, call=call) as calls:
        error = attempted(reshard)
    now = state_jobs.same(before, everything(dmp, dense))
    for model, optimizer in ((dmp, dense), (twin, twin_dense)):
        train(model, optimizer, 2, 2)
    apart = state_jobs.same(everything(twin, twin_dense), everything(dmp, dense))
    if size is not None:
        return error, calls[0], now, apart, []
    reshard()
    train(dmp, dense, 4, 1)
    train(twin, twin_dense, 4, 1)
    return error, calls[0], now, apart, state_jobs.same(state_jobs.everything(twin), state_jobs.everything(dmp))


def no_memory_to_return(bound: int) -> tuple[str, list[str], str, list[str]]:
    """Rank 1 cannot build kernels at all, new ones or old ones, until its memory is free again.

    Returns:
        The error, errors of use meanwhile, the error of the next reshard, and what differs from before after it.
    """
    dmp, dense = build()
    train(dmp, dense, 0, 2)
    before = everything(dmp, dense)
    with failing(*owner_of("distributed.sharded_collections:ShardedCollection.place"), rank=1, call=-1):
        error = attempted(lambda: dmp.reshard(plan("column_wise"), max_extra_bytes=bound, optimizers=[dense]))
        used = [attempted(use) for use in (dmp.state_dict, lambda: dmp.collections["one"].table_shards())]
    again = attempted(lambda: dmp.reshard(plan("row_wise"), max_extra_bytes=bound, optimizers=[dense]))
    return error, used, again, state_jobs.same(before, everything(dmp, dense))


# ---- constructors ----


def construct_failing(where: str, groups: int | None) -> tuple[str, int]:
    """The error of a constructor in which one step raises on rank 1, and how often the step ran."""
    with failing(*owner_of(where), rank=1) as calls:
        error = attempted(lambda: build(groups))
    return error, calls[0]


def construct_apart(what: str, kind: str) -> str:
    """The error of a constructor that is called with other things on rank 1."""
    odd = torch.distributed.get_rank() == 1
    rows = ROWS + odd * (what == "rows")
    optimizer = "exact_sgd" if odd and what == "optimizer" else "adam"
    table = EmbeddingBagConfig(
        name="u" if odd and what == "name" else "t", num_embeddings=rows, embedding_dim=DIM, feature_names=["f"]
    )
    shards = [Shard(int(odd and what == "shards"), (0, rows), (0, DIM))]
    chosen: Any = ParameterSharding("table_wise", shards=shards)
    if odd and what == "kernel":
        chosen = ParameterSharding("table_wise", "dense", shards=shards)
    given = None if odd and what == "no plan" else ShardingPlan({"": {table.name: chosen}})  # type: ignore[dict-item]
    codecs = get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.FP16)) if odd and what == "codecs" else None
    sharders = [EmbeddingBagCollectionSharder({"optimizer": optimizer}, codecs)]
    module: Any = EmbeddingBagCollection([table]).requires_grad_(not (odd and what == "frozen"))
    if what == "dense":
        module = nn.Sequential(module, nn.Linear(DIM + odd, 1))
        given = ShardingPlan({"0": {"t": chosen}})  # type: ignore[dict-item]
    if kind == "sharder":
        assert given is not None
        return attempted(lambda: sharders[0].shard(module, dict(given.plan[""])))
    if kind == "2d":
        world = torch.distributed.group.WORLD
        return attempted(lambda: DMPCollection(module, "cpu", given, 2, 2, world, sharders=sharders))
    arguments: dict[str, Any] = {"init_data_parallel": not (odd and what == "switch")}
    if odd and what == "device":
        arguments["device"] = "nonsense"
    return attempted(lambda: DistributedModelParallel(module, plan=given, sharders=sharders, **arguments))


def works_after() -> float:
    """The ranks are in step: a model is built and trained."""
    dmp, dense = build()
    train(dmp, dense, 0, 1)
    return float(dmp(batch(9)).detach())


# ---- checkpoints and pretrained tables ----


def save_failing(where: str, call: int, path: str, error: str) -> tuple[str, int, list[str]]:
    """A save in which one step raises on one rank, over a checkpoint that is there.

    Returns:
        The error, how often the step ran, and what differs from the checkpoint before when it is loaded afterwards.
    """
    dmp, dense = build()
    train(dmp, dense, 0, 2)
    save_checkpoint(path, dmp, dense, extra={"step": 2})
    before = everything(dmp, dense)
    train(dmp, dense, 2, 1)
    kinds = {"full": lambda text: OSError(28, "No space left on device"), "memory": MemoryError, "odd": RuntimeError}
    rank = 0 if "complete_folders" in where or "_start" in where else 1
    with failing(*owner_of(where), rank=rank, call=call, error=kinds[error]) as calls:
        said = attempted(lambda: save_checkpoint(path, dmp, dense, extra={"step": 3}))
    step = load_checkpoint(path, dmp, dense).extra["step"]
    dense.zero_grad()
    now = {name: value for name, value in everything(dmp, dense).items() if not name.startswith("gradient")}
    before = {name: value for name, value in before.items() if not name.startswith("gradient")}
    return said, calls[0], [*state_jobs.same(before, now), *([] if step == 2 else [f"step {step}"])]


def load_failing(where: str, call: int, path: str) -> tuple[str, int]:
    """The error of a load in which one step raises on rank 1, and how often the step ran."""
    dmp, dense = build(scheme="column_wise")
    with failing(*owner_of(where), rank=1, call=call) as calls:
        return attempted(lambda: load_checkpoint(path, dmp, dense)), calls[0]


def save_once(path: str) -> None:
    """A checkpoint to load."""
    dmp, dense = build()
    train(dmp, dense, 0, 1)
    save_checkpoint(path, dmp, dense)


def pretrained_failing(where: str) -> tuple[str, int, list[str]]:
    """The error of loading a table in which one step raises on rank 1, how often it ran, and what changed."""
    dmp, dense = build()
    before = everything(dmp, dense)
    with failing(*owner_of(where), rank=1) as calls:
        said = attempted(lambda: load_pretrained(dmp, {"a0": torch.ones(ROWS, DIM)}))
    return said, calls[0], state_jobs.same(before, everything(dmp, dense))


# ---- other collective calls ----


def sync_failing() -> str:
    """The error of a sync to which rank 1 passes no optimizer."""
    dmp, dense = build(1)
    train(dmp, dense, 0, 1)
    mine = None if torch.distributed.get_rank() == 1 else [dense]
    return attempted(lambda: dmp.sync(optimizers=mine))


def plan_failing() -> list[str]:
    """Errors of planning that fails on rank 0 with something else than a PlanError: alone, and in a constructor."""
    world, found = torch.distributed.get_world_size(), []
    with failing(EmbeddingShardingPlanner, "plan", rank=0, call=-1):
        planner = EmbeddingShardingPlanner(Topology(world))
        found.append(attempted(lambda: planner.collective_plan(Two(), get_default_sharders())))
        found.append(attempted(lambda: DistributedModelParallel(Two())))
    return found


def shard_failing() -> str:
    """The error of `shard` with a module that no sharder is for on rank 1 alone."""
    odd = torch.distributed.get_rank() == 1
    module: Any = nn.Linear(2, 2) if odd else EmbeddingBagCollection(tables("a"))
    return attempted(lambda: shard(module, row_wise()))


def state_dict_apart() -> tuple[str, str]:
    """Errors of loading a state dict in which a table has another size on rank 1, or on all ranks.

    Some rows of the table are on both ranks, so that loading exchanges them.
    """
    mixed = plan("column_wise")
    shards = [Shard(0, (0, 4), (0, DIM)), Shard(1, (0, 4), (0, DIM)), Shard(0, (4, ROWS), (0, DIM))]
    hot = {**mixed.plan["one"], "a0": ParameterSharding("custom", shards=shards)}
    dmp = DistributedModelParallel(Two(), plan=ShardingPlan({**mixed.plan, "one": hot}))  # type: ignore[dict-item]
    shards = dmp.collections["one"].table_shards()["a0"]
    assert shards.replica_moves(shards.parts()[0])
    state = dmp.state_dict()
    wrong = {**state, "one.embedding_bags.a0.weight": torch.zeros(ROWS + 1, DIM)}
    odd = torch.distributed.get_rank() == 1
    loads = [lambda: dmp.load_state_dict(wrong if odd else state), lambda: dmp.load_state_dict(wrong)]
    return attempted(loads[0]), attempted(loads[1])
