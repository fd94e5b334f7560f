"""DistributedModelParallel with sharders of the user: what they allow, what they shard, and what they return."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, ShardingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import data_parallel, row_wise, table_wise
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ModuleSharder,
    NoWait,
    NullShardedModuleContext,
    ParameterSharding,
    ShardedModule,
    ShardingEnv,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.compat.parity.case import case, raised
from tests.compat.parity.cases.dmp import DMP, Model, tables
from tests.compat.parity.sharded_tables import CPU, batch, fill, plan_of

TYPES = "torchrec.distributed.types"
BAG_SHARDER = "torchrec.distributed.embeddingbag.EmbeddingBagCollectionSharder"


class Rows(nn.Module):
    """A table of the user, which no collection of the library is."""

    def __init__(self, rows: int = 6, columns: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(float(rows * columns)).view(rows, columns))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]


class Waiting(LazyAwaitable[torch.Tensor]):
    """The rows of local ids, once they are needed."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows

    def _wait_impl(self) -> torch.Tensor:
        return self.rows


class ShardedRows(ShardedModule[Any, Any, torch.Tensor, NullShardedModuleContext]):
    """Row shards of `Rows`: each rank reads all ids, and the parts are added."""

    def __init__(self, module: Rows, env: ShardingEnv, registry: Any = None) -> None:
        super().__init__(registry)
        self.env = env
        self.height = module.weight.shape[0] // env.world_size
        first = env.rank * self.height
        self.weight = nn.Parameter(module.weight.detach()[first : first + self.height].clone())

    def create_context(self) -> NullShardedModuleContext:
        return NullShardedModuleContext()

    def input_dist(self, ctx: Any, ids: torch.Tensor) -> Awaitable[Awaitable[torch.Tensor]]:
        every = [torch.empty_like(ids) for _ in range(self.env.world_size)]
        dist.all_gather(every, ids, group=self.env.process_group)
        return NoWait(NoWait(torch.cat(every)))

    def compute(self, ctx: Any, dist_input: torch.Tensor) -> torch.Tensor:
        own = dist_input - self.env.rank * self.height
        here = (own >= 0) & (own < self.height)
        return torch.where(here.unsqueeze(1), self.weight[own.clamp(0, self.height - 1)], torch.zeros(1))

    def output_dist(self, ctx: Any, output: torch.Tensor) -> LazyAwaitable[torch.Tensor]:
        total = output.detach().clone()
        dist.all_reduce(total, group=self.env.process_group)
        return Waiting(total.chunk(self.env.world_size)[self.env.rank])

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return Rows


class RowsSharder(ModuleSharder[Rows]):
    """Shards `Rows`."""

    def __init__(self, seen: list[Any] | None = None) -> None:
        super().__init__()
        self.seen = seen if seen is not None else []

    def shard(
        self, module: Rows, params: Any, env: ShardingEnv, device: Any = None, module_fqn: str | None = None
    ) -> ShardedRows:
        self.seen.append([sorted(params), params["weight"].sharding_type, env.world_size, str(device), module_fqn])
        return ShardedRows(module, env, self.qcomm_codecs_registry)

    @property
    def module_type(self) -> type[Rows]:
        return Rows

    def shardable_parameters(self, module: Rows) -> dict[str, nn.Parameter]:
        return {"weight": module.weight}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [ShardingType.ROW_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]


class Both(nn.Module):
    """A table of the user, a collection and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Rows()
        config = EmbeddingBagConfig(name="a", num_embeddings=8, embedding_dim=2, feature_names=["f"])
        self.bags = EmbeddingBagCollection(tables=[config])
        self.over = nn.Linear(2, 1)
        with torch.no_grad():
            self.bags.embedding_bags["a"].weight.copy_(torch.arange(16.0).view(8, 2))
            self.over.weight.fill_(0.5)
            self.over.bias.zero_()

    def forward(self, ids: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.rows(ids) + self.bags(features).values())


def own_plan(model: Both, world_size: int = 2) -> ShardingPlan:
    rows = {"weight": ParameterSharding("row_wise", "dense", [0, 1])}
    return ShardingPlan({"rows": rows, **plan_of(model.bags, {"a": table_wise(rank=1)}, world_size).plan})


@case(f"{TYPES}.ModuleSharder", f"{TYPES}.ShardedModule", DMP, ranks=2)
def a_module_of_the_user_is_sharded(rank: int) -> Any:
    seen: list[Any] = []
    model = Both()
    sharders = [RowsSharder(seen), EmbeddingBagCollectionSharder()]
    dmp = DistributedModelParallel(model, device=CPU, plan=own_plan(model), sharders=sharders)
    features = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    with torch.no_grad():
        for value in [dmp.state_dict()["bags.embedding_bags.a.weight"]]:
            for own in value.local_shards():
                own.tensor.copy_(torch.arange(16.0).view(8, 2))
    output = dmp(torch.tensor([rank, 5]), features)
    return {
        "seen": seen,
        "type": type(dmp.module.rows).__name__,
        "is sharded": [isinstance(own, ShardedModule) for own in (dmp.module.rows, dmp.module.bags)],
        "output": output,
        "parameters": {name: list(own.shape) for name, own in dmp.named_parameters() if own.numel()},
        "state": {name: list(own.size()) for name, own in sorted(dmp.state_dict().items())},
    }


@case(f"{TYPES}.ShardedModule", DMP, ranks=2)
def weights_of_the_user_are_not_replicated(rank: int) -> Any:
    model = Both()
    sharders = [RowsSharder(), EmbeddingBagCollectionSharder()]
    dmp = DistributedModelParallel(model, device=CPU, plan=own_plan(model), sharders=sharders)
    return {"rows": dmp.module.rows.weight, "names": list(dmp.module.rows.sharded_parameter_names("rows"))}


@case(f"{TYPES}.ModuleSharder")
def what_a_sharder_offers() -> Any:
    class Plain(ModuleSharder[Rows]):
        def shard(self, module: Rows, params: Any, env: Any, device: Any = None, module_fqn: Any = None) -> Any:
            return module

        @property
        def module_type(self) -> type[Rows]:
            return Rows

    own = Plain()
    return [
        own.qcomm_codecs_registry,
        sorted(own.shardable_parameters(Rows())),
        raised(lambda: ModuleSharder()),
        own.module_type is Rows,
    ]


@case(f"{TYPES}.ModuleSharder", differs="all schemes and kernels, until a subclass restricts them")
def what_a_sharder_allows() -> Any:
    class Plain(RowsSharder):
        sharding_types = ModuleSharder.sharding_types
        compute_kernels = ModuleSharder.compute_kernels

    own = Plain()
    return [own.sharding_types("cpu"), own.compute_kernels("data_parallel", "cpu")]


class Logged(EmbeddingBagCollectionSharder):
    """The library's sharder, with a note of each call."""

    def __init__(self, seen: list[Any], **options: Any) -> None:
        super().__init__(**options)
        self.seen = seen

    def shard(self, module: Any, params: Any, env: Any, device: Any = None, module_fqn: Any = None) -> Any:
        self.seen.append([type(module).__name__, sorted(params), module_fqn])
        return super().shard(module, params, env, device, module_fqn)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["table_wise"]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return ["fused"]


def bags_plan(model: Model) -> ShardingPlan:
    generators = {"a": row_wise(), "b": table_wise(rank=1), "c": data_parallel(), "d": table_wise(rank=0)}
    return plan_of(model.bags, generators)


@case(BAG_SHARDER, DMP, ranks=2)
def a_sharder_that_calls_the_library(rank: int) -> Any:
    seen: list[Any] = []
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.1})
    dmp = DistributedModelParallel(model, device=CPU, plan=bags_plan(model), sharders=[Logged(seen)])
    fill(dmp)
    output = dmp(batch(rank))
    output.sum().backward()
    return {
        "calls": seen,
        "type": type(dmp.module.bags).__name__,
        "output": output,
        "rates": sorted({float(group["lr"]) for group in dmp.fused_optimizer.param_groups}),
        **tables(dmp, rank),
    }


class Changes(EmbeddingBagCollectionSharder):
    """Changes what the library has sharded."""

    def shard(self, module: Any, params: Any, env: Any, device: Any = None, module_fqn: Any = None) -> Any:
        sharded = super().shard(module, params, env, device, module_fqn)
        sharded.mark = f"{module_fqn} on {env.rank}"
        return sharded


@case(BAG_SHARDER, DMP, ranks=2)
def the_module_that_a_sharder_returns_is_used(rank: int) -> Any:
    model = Model()
    dmp = DistributedModelParallel(model, device=CPU, plan=bags_plan(model), sharders=[Changes()])
    return dmp.module.bags.mark


class MyBags(EmbeddingBagCollection):
    """A collection of the user."""


class MyBagsSharder(Logged):
    @property
    def module_type(self) -> type[MyBags]:
        return MyBags


@case(BAG_SHARDER, DMP, ranks=2)
def a_subclass_of_a_collection(rank: int) -> Any:
    model, seen = Model(), []
    model.bags = MyBags(model.bags.embedding_bag_configs())
    dmp = DistributedModelParallel(model, device=CPU, plan=bags_plan(model), sharders=[MyBagsSharder(seen)])
    fill(dmp)
    return {"seen": seen, "output": dmp(batch(rank)), "type": type(dmp.module.bags).__name__}


@case(BAG_SHARDER, "torchrec.distributed.planner.EmbeddingShardingPlanner")
def a_plan_within_a_sharder_of_the_user() -> Any:
    topology = Topology(world_size=2, compute_device="cpu")
    plan = EmbeddingShardingPlanner(topology=topology).plan(Model(), [Logged([])])
    return {name: [own.sharding_type, own.compute_kernel] for name, own in sorted(plan.plan["bags"].items())}


@case(BAG_SHARDER, DMP, "torchrec.distributed.planner.EmbeddingShardingPlanner", ranks=2)
def a_model_is_planned_within_a_sharder_of_the_user(rank: int) -> Any:
    seen: list[Any] = []
    dmp = DistributedModelParallel(Model(), device=CPU, sharders=[Logged(seen)])
    kinds = {own.sharding_type for own in dmp.plan.plan["bags"].values()}
    return [seen, kinds]


@case(f"{TYPES}.ModuleSharder", "torchrec.distributed.planner.EmbeddingShardingPlanner")
def a_module_of_the_user_is_planned() -> Any:
    topology = Topology(world_size=2, compute_device="cpu")
    plan = EmbeddingShardingPlanner(topology=topology).plan(Both(), [RowsSharder(), EmbeddingBagCollectionSharder()])
    own = plan.plan["rows"]["weight"]
    shards = [[list(shard.shard_offsets), list(shard.shard_sizes)] for shard in own.sharding_spec.shards]
    return {"paths": sorted(plan.plan), "rows": [own.sharding_type, own.compute_kernel, own.ranks, shards]}


@case(f"{TYPES}.ModuleSharder", DMP, ranks=2)
def a_module_of_the_user_is_planned_and_sharded(rank: int) -> Any:
    sharders = [RowsSharder(), EmbeddingBagCollectionSharder()]
    dmp = DistributedModelParallel(Both(), device=CPU, sharders=sharders)
    return [sorted(dmp.plan.plan), type(dmp.module.rows).__name__, list(dmp.module.rows.weight.shape)]


def stages(module: Any, *arguments: Any) -> Iterator[Any]:
    context = module.create_context()
    sent = module.input_dist(context, *arguments).wait().wait()
    yield sent
    yield module.compute_and_output_dist(context, sent) + 0


@case(f"{TYPES}.ShardedModule", ranks=2)
def stages_of_a_module_of_the_user(rank: int) -> Any:
    own = ShardedRows(Rows(), ShardingEnv.from_process_group(dist.group.WORLD))
    prefetched = own.prefetch(torch.tensor([0]))
    return [*stages(own, torch.tensor([rank, 3])), own.qcomm_codecs_registry, prefetched, own.unsharded_module_type]


@case(f"{TYPES}.ShardedModule")
def a_sharded_module_is_abstract() -> Any:
    return [raised(lambda: ShardedModule()), issubclass(ShardedEmbeddingBagCollection, ShardedModule)]
