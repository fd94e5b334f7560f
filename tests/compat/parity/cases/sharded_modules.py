"""Stages of sharded modules, called by hand: contexts, input exchange, lookup, output exchange."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import (
    EmbeddingCollectionAwaitable,
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, ShardedEmbeddingModule
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.fused_embeddingbag import (
    FusedEmbeddingBagCollectionSharder,
    ShardedFusedEmbeddingBagCollection,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    apply_to_all,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import Awaitable, LazyAwaitable, ModuleSharder, ShardedModule, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from tests.compat.parity.case import case, on_ranks, raised

CPU = torch.device("cpu")
BAG, SEQ = "torchrec.distributed.embeddingbag", "torchrec.distributed.embedding"
SHARDED_BAG, SHARDED_SEQ = f"{BAG}.ShardedEmbeddingBagCollection", f"{SEQ}.ShardedEmbeddingCollection"


def bags(names: str = "abcd", **options: Any) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=8, embedding_dim=8, feature_names=[f"f_{name}"]) for name in names
    ]
    return EmbeddingBagCollection(tables=tables, **options)


def sequences(names: str = "abcd", **options: Any) -> EmbeddingCollection:
    tables = [
        EmbeddingConfig(name=name, num_embeddings=8, embedding_dim=8, feature_names=[f"f_{name}"]) for name in names
    ]
    return EmbeddingCollection(tables=tables, **options)


def batch(rank: int = 0, weighted: bool = False) -> KeyedJaggedTensor:
    """Two samples of each feature."""
    return KeyedJaggedTensor(
        keys=[f"f_{name}" for name in "abcd"],
        values=torch.tensor([0, 3, 1, 2, 7, 7, 4, 5] if rank == 0 else [6, 3, 0, 2, 1, 5, 4, 5]),
        weights=torch.arange(8) / 4 if weighted else None,
        lengths=torch.tensor([1, 1, 2, 0, 1, 1, 0, 2]),
    )


GENERATORS = {"a": row_wise(), "b": table_wise(rank=1), "c": data_parallel(), "d": column_wise(ranks=[0, 1])}


def fill(module: nn.Module) -> None:
    """Row r of each table has r / 10 in each column."""
    with torch.no_grad():
        for value in module.state_dict().values():
            if hasattr(value, "local_shards"):
                for own in value.local_shards():
                    row, rows = own.metadata.shard_offsets[0], own.metadata.shard_sizes[0]
                    own.tensor.copy_((torch.arange(row, row + rows) / 10).unsqueeze(1).expand_as(own.tensor))
            else:
                value.copy_((torch.arange(value.shape[0]) / 10).unsqueeze(1).expand_as(value))


def rows_of(module: nn.Module, rank: int) -> Any:
    """The sum of each row; None on other ranks than 0."""
    found = {}
    for name, value in sorted(module.state_dict().items()):
        if hasattr(value, "local_shards"):
            full = torch.zeros(value.size()) if rank == 0 else None
            value.gather(0, full)
            value = full
        found[name] = None if value is None or rank else value.sum(1)
    return found


def sharded(module: Any, sharder: Any, generators: Any = None, optimizer: Any = None, **options: Any) -> Any:
    """The module, sharded over all ranks, with its rows filled."""
    optimizer = torch.optim.SGD if optimizer is None else optimizer
    apply_optimizer_in_backward(optimizer, module.parameters(), {"lr": 0.1, **options})
    world = dist.get_world_size()
    plan = construct_module_sharding_plan(
        module, generators or GENERATORS, sharder, local_size=world, world_size=world, device_type="cpu"
    )
    own = sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD), CPU)
    fill(own)
    return own


def by_stages(module: Any, features: KeyedJaggedTensor) -> Any:
    """A forward, stage by stage."""
    ctx = module.create_context()
    ids = module.input_dist(ctx, features).wait().wait()
    return module.output_dist(ctx, module.compute(ctx, ids))


@case(SHARDED_BAG)
def a_loop_over_the_stages() -> Any:
    def job(rank: int) -> Any:
        module = sharded(bags(), EmbeddingBagCollectionSharder())
        outputs = []
        for _ in range(3):
            output = by_stages(module, batch(rank))
            output.values().sum().backward()
            outputs.append(output.values())
        return {"outputs": outputs, "rows": rows_of(module, rank)}

    return on_ranks(2, job)


@case(SHARDED_BAG)
def the_next_batch_is_sent_before_backward() -> Any:
    def job(rank: int) -> Any:
        module = sharded(bags(), EmbeddingBagCollectionSharder())
        batches, outputs = [batch(rank), batch(1 - rank), batch(rank)], []
        ctx = module.create_context()
        ids = module.input_dist(ctx, batches[0]).wait().wait()
        for number in range(3):
            output = module.compute_and_output_dist(ctx, ids)
            if number < 2:
                ctx = module.create_context()
                ids = module.input_dist(ctx, batches[number + 1]).wait().wait()
            output.values().sum().backward()
            outputs.append(output.values())
        return {"outputs": outputs, "rows": rows_of(module, rank)}

    return on_ranks(2, job)


@case(SHARDED_SEQ)
def a_loop_over_the_stages_of_sequences() -> Any:
    def job(rank: int) -> Any:
        module = sharded(sequences(), EmbeddingCollectionSharder())
        outputs = []
        for _ in range(2):
            output = by_stages(module, batch(rank))
            torch.cat([output[f"f_{name}"].values() for name in "abcd"]).sum().backward()
            outputs.append({key: jagged.values() for key, jagged in output.items()})
        return {"outputs": outputs, "lengths": output["f_b"].lengths(), "rows": rows_of(module, rank)}

    return on_ranks(2, job)


@case(SHARDED_BAG)
def stages_give_what_forward_gives() -> Any:
    def job(rank: int) -> Any:
        module = sharded(bags(), EmbeddingBagCollectionSharder())
        with torch.no_grad():
            return [by_stages(module, batch(rank)).values(), module(batch(rank)).values()]

    return on_ranks(2, job)


@case(SHARDED_BAG)
def weighted_bags() -> Any:
    def job(rank: int) -> Any:
        module = sharded(bags(is_weighted=True), EmbeddingBagCollectionSharder())
        output = by_stages(module, batch(rank, weighted=True)).values()
        output.sum().backward()
        return {"output": output, "rows": rows_of(module, rank)}

    return on_ranks(2, job)


@case(SHARDED_BAG)
def rowwise_adagrad_over_the_stages() -> Any:
    def job(rank: int) -> Any:
        module = sharded(bags("ab"), EmbeddingBagCollectionSharder(), {"a": row_wise(), "b": table_wise(rank=0)},
                         RowWiseAdagrad)  # fmt: skip
        for _ in range(2):
            by_stages(module, batch(rank)).values().sum().backward()
        return rows_of(module, rank)

    return on_ranks(2, job)


@case(SHARDED_BAG, f"{BAG}.EmbeddingBagCollectionAwaitable", f"{SEQ}.EmbeddingCollectionAwaitable")
def outputs_are_awaitables() -> Any:
    def job(rank: int) -> Any:
        pooled = sharded(bags(), EmbeddingBagCollectionSharder())
        rows = sharded(sequences(), EmbeddingCollectionSharder())
        first, second = pooled(batch(rank)), rows(batch(rank))
        return {
            "pooled": [isinstance(first, EmbeddingBagCollectionAwaitable), isinstance(first, LazyAwaitable)],
            "rows": [isinstance(second, EmbeddingCollectionAwaitable), isinstance(second, LazyAwaitable)],
            "waited": first.wait(),
            "keys": sorted(second.wait()),
        }

    return on_ranks(2, job)


@case(SHARDED_BAG, f"{BAG}.EmbeddingBagCollectionContext", f"{SEQ}.EmbeddingCollectionContext")
def contexts() -> Any:
    def job(rank: int) -> Any:
        module = sharded(bags(), EmbeddingBagCollectionSharder())
        ctx, other = module.create_context(), sharded(sequences(), EmbeddingCollectionSharder()).create_context()
        waiting = module.input_dist(ctx, batch(rank))
        first = waiting.wait()
        first.wait()
        return {
            "types": [isinstance(ctx, EmbeddingBagCollectionContext), isinstance(other, EmbeddingCollectionContext)],
            "streamable": isinstance(ctx, Multistreamable),
            "inverse": ctx.inverse_indices,
            "variable": ctx.variable_batch_per_feature,
            "awaitables": [isinstance(waiting, Awaitable), isinstance(first, Awaitable)],
        }

    return on_ranks(2, job)


@case(SHARDED_BAG)
def names_and_types_of_a_sharded_module() -> Any:
    def job(rank: int) -> Any:
        module = sharded(bags(), EmbeddingBagCollectionSharder())
        return {
            "state": sorted(module.state_dict()),
            "names": sorted(module.sharded_parameter_names()),
            "with prefix": sorted(module.sharded_parameter_names("m")),
            "unsharded": module.unsharded_module_type.__name__,
            "sharded": [isinstance(module, ShardedModule), isinstance(module, ShardedEmbeddingModule)],
            "training": module.training,
            "evaluation": module.eval().training,
        }

    return on_ranks(2, job)


@case(SHARDED_BAG)
def rates_of_one_sharded_module() -> Any:
    def job(rank: int) -> Any:
        module = sharded(bags("ab"), EmbeddingBagCollectionSharder(), {"a": row_wise(), "b": table_wise(rank=0)})
        for group in module.fused_optimizer.param_groups:
            group["lr"] = 0.5
        module.fused_optimizer.step()
        by_stages(module, batch(rank)).values().sum().backward()
        return rows_of(module, rank)

    return on_ranks(2, job)


@case(SHARDED_SEQ)
def rows_with_their_ids() -> Any:
    def job(rank: int) -> Any:
        module = sharded(sequences("ab", need_indices=True), EmbeddingCollectionSharder(),
                         {"a": row_wise(), "b": table_wise(rank=0)})  # fmt: skip
        return {key: [own.values(), own.weights_or_none()] for key, own in module(batch(rank)).items()}

    return on_ranks(2, job)


@case("torchrec.distributed.fused_embeddingbag.FusedEmbeddingBagCollectionSharder",
      "torchrec.distributed.fused_embeddingbag.ShardedFusedEmbeddingBagCollection")  # fmt: skip
def fused_collections() -> Any:
    def job(rank: int) -> Any:
        tables = [EmbeddingBagConfig(name=n, num_embeddings=8, embedding_dim=8, feature_names=[f"f_{n}"]) for n in "ab"]
        module = FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": 0.1})
        sharder = FusedEmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(
            module, {"a": row_wise(), "b": table_wise(rank=0)}, sharder, 2, 2, device_type="cpu"
        )
        own = DistributedModelParallel(module, device=CPU, plan=ShardingPlan({"": plan}), sharders=[sharder])
        fill(own)
        output = own(batch(rank)).values()
        output.sum().backward()
        return {
            "output": output,
            "pooled": isinstance(own.module, ShardedEmbeddingBagCollection),
            "fused": issubclass(ShardedFusedEmbeddingBagCollection, ShardedEmbeddingBagCollection),
        }

    return on_ranks(2, job)


@case(SHARDED_BAG)
def ranks_with_different_batch_sizes() -> Any:
    def job(rank: int) -> Any:
        module = sharded(
            bags("ab"), EmbeddingBagCollectionSharder(), {"a": table_wise(rank=0), "b": table_wise(rank=1)}
        )
        features = KeyedJaggedTensor(
            keys=["f_a", "f_b"], values=torch.arange(2 + 2 * rank), lengths=torch.ones(2 + 2 * rank, dtype=torch.long)
        )
        return by_stages(module, features).values()

    return on_ranks(2, job)


@case(SHARDED_BAG)
def features_that_the_tables_do_not_have() -> Any:
    def job(rank: int) -> Any:
        module = sharded(bags("ab"), EmbeddingBagCollectionSharder(), {"a": row_wise(), "b": table_wise(rank=0)})
        return module(batch(rank)).wait()

    return on_ranks(2, job)


@case(SHARDED_BAG)
def a_feature_that_is_missing() -> Any:
    def job(rank: int) -> Any:
        module = sharded(bags("ab"), EmbeddingBagCollectionSharder(), {"a": row_wise(), "b": table_wise(rank=0)})
        features = KeyedJaggedTensor(keys=["f_a"], values=torch.tensor([1]), lengths=torch.tensor([1]))
        return raised(lambda: module(features).wait()) != "nothing"

    return on_ranks(2, job)


@case(f"{BAG}.EmbeddingBagCollectionSharder", f"{SEQ}.EmbeddingCollectionSharder")
def settings_of_sharders() -> Any:
    sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.5, "eps": 0.1})
    return {
        "fused": [sharder.fused_params["learning_rate"], sharder.fused_params["eps"]],
        "none": EmbeddingBagCollectionSharder().qcomm_codecs_registry,
        "types": [
            EmbeddingBagCollectionSharder().module_type.__name__,
            EmbeddingCollectionSharder().module_type.__name__,
        ],
        "parameters": {name: list(own.shape) for name, own in sharder.shardable_parameters(bags("ab")).items()},
        "sharders": [isinstance(sharder, ModuleSharder), isinstance(sharder, BaseEmbeddingSharder)],
    }


class OnlyRows(EmbeddingBagCollectionSharder):
    """A user's sharder: it restricts the planner."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise"]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return ["fused"]


@case(f"{BAG}.EmbeddingBagCollectionSharder")
def a_sharder_of_the_user() -> Any:
    def job(rank: int) -> Any:
        module = sharded(bags(), OnlyRows(), apply_to_all(bags(), row_wise()))
        return {"output": module(batch(rank)).values(), "type": isinstance(module, ShardedEmbeddingBagCollection)}

    return on_ranks(2, job)


@case(SHARDED_SEQ)
def sequences_in_a_model() -> Any:
    def job(rank: int) -> Any:
        model = nn.Sequential(sequences("ab"))
        apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        plan = construct_module_sharding_plan(
            model[0], {"a": row_wise(), "b": column_wise(ranks=[0, 1])}, EmbeddingCollectionSharder(), 2, 2, "cpu"
        )
        own = DistributedModelParallel(model, device=CPU, plan=ShardingPlan({"0": plan}))
        fill(own)
        output = own(batch(rank))
        output["f_a"].values().sum().backward()
        return {
            "type": isinstance(own.module[0], ShardedEmbeddingCollection),
            "output": {key: jagged.values() for key, jagged in output.items()},
            "dense": {key: jagged.to_padded_dense(2)[:, :, 0] for key, jagged in output.items()},
            "rows": rows_of(own, rank),
        }

    return on_ranks(2, job)
