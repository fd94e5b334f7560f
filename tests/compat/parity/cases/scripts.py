"""Small programs from end to end: build, shard, train three steps; losses and final weights."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from tests.compat.parity.case import case, on_ranks
from tests.compat.parity.cases.pipelines import outputs_of
from tests.compat.parity.sharded_tables import CPU, shards

DMP = "torchrec.distributed.model_parallel.DistributedModelParallel"
EBC = "torchrec.modules.embedding_modules.EmbeddingBagCollection"
EC = "torchrec.modules.embedding_modules.EmbeddingCollection"
PLAN = "torchrec.distributed.sharding_plan"
PIPELINE = "torchrec.distributed.train_pipeline"
IN_BACKWARD = "torchrec.optim.apply_optimizer_in_backward.apply_optimizer_in_backward"
ROWS, DIM, FEATURES = 6, 8, ("a", "b")
Generators = dict[str, Any]


class Model(nn.Module):
    """Tables and one layer. Returns the loss and the predictions, as a training pipeline needs."""

    def __init__(self, tables: nn.Module, width: int) -> None:
        super().__init__()
        self.tables, self.over = tables, nn.Linear(width, 1)
        with torch.no_grad():
            self.over.weight.copy_(torch.linspace(-0.5, 0.5, width).unsqueeze(0))
            self.over.bias.fill_(0.1)

    def forward(self, kjt: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.tables(kjt).values()
        predicted = self.over(pooled).squeeze(1)
        return (predicted - 1).square().mean(), predicted


def bags(pooling: PoolingType = PoolingType.SUM, is_weighted: bool = False) -> Model:
    tables = [
        EmbeddingBagConfig(name=f"t_{f}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f], pooling=pooling)
        for f in FEATURES
    ]
    return Model(EmbeddingBagCollection(tables=tables, is_weighted=is_weighted), len(FEATURES) * DIM)


def shared() -> Model:
    """One table for both features."""
    table = EmbeddingBagConfig(name="t_a", num_embeddings=ROWS, embedding_dim=DIM, feature_names=list(FEATURES))
    return Model(EmbeddingBagCollection(tables=[table]), len(FEATURES) * DIM)


class Sequences(nn.Module):
    """A collection without pooling, padded to four ids."""

    def __init__(self, tables: EmbeddingCollection) -> None:
        super().__init__()
        self.ec = tables

    def forward(self, kjt: KeyedJaggedTensor) -> KeyedTensor:
        out = self.ec(kjt)
        parts = [out[key].to_padded_dense(4).flatten(1) for key in FEATURES]
        return KeyedTensor.from_tensor_list(list(FEATURES), parts)


def sequences() -> Model:
    tables = [
        EmbeddingConfig(name=f"t_{f}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f]) for f in FEATURES
    ]
    return Model(Sequences(EmbeddingCollection(tables=tables)), len(FEATURES) * 4 * DIM)


def batch(rank: int, step: int, weighted: bool = False) -> KeyedJaggedTensor:
    """Three samples a rank; one bag is empty, and ids repeat."""
    lengths = torch.tensor([2, 0, 1, 1, 3, 1])
    ids = (torch.arange(8) * (step + 2) + rank) % ROWS
    weights = torch.linspace(0.5, 2.0, 8) if weighted else None
    return KeyedJaggedTensor(keys=list(FEATURES), values=ids, lengths=lengths, weights=weights)


def set_tables(dmp: nn.Module) -> None:
    """Weights by row and column, the same under every plan."""
    with torch.no_grad():
        for row, col, weight in shards(dmp):
            rows, cols = (torch.arange(size) for size in weight.shape)
            weight.copy_(torch.sin((rows + row).unsqueeze(1) * 1.3 + (cols + col).unsqueeze(0) * 0.7) / 2)


def weights_of(dmp: nn.Module) -> dict[str, Any]:
    """Name -> weight, or [offsets, weight] for each shard of this rank, with rounded numbers."""
    found: dict[str, Any] = {}
    for name, tensor in dmp.state_dict().items():
        if hasattr(tensor, "local_shards"):
            found[name] = [[list(s.metadata.shard_offsets), short(s.tensor)] for s in tensor.local_shards()]
        else:
            found[name] = short(tensor)
    return found


def short(tensor: torch.Tensor) -> list[Any]:
    """Sums of rows and of columns: they show every change, in fewer numbers."""
    data = tensor.detach().double()
    numbers = torch.cat([data.sum(1), data.sum(0)]) if data.dim() > 1 else data
    return [round(number, 7) for number in numbers.tolist()]


def sharders(fused: dict[str, Any] | None = None) -> list[Any]:
    return [EmbeddingBagCollectionSharder(fused), EmbeddingCollectionSharder(fused)]


def sharded(model: Model, generators: Generators, world: int) -> nn.Module:
    """The model on this rank under a plan by hand, with weights set."""
    sequence = isinstance(model.tables, Sequences)
    module = model.tables.ec if sequence else model.tables
    sharder = sharders()[1 if sequence else 0]
    plan = construct_module_sharding_plan(
        module, generators, sharder=sharder, local_size=world, world_size=world, device_type="cpu"
    )
    dmp: nn.Module = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan({"tables.ec" if sequence else "tables": plan}),
        sharders=sharders(),
    )
    set_tables(dmp)
    return dmp


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def optimizer_of(dmp: nn.Module, make: Callable[..., Any] = sgd) -> CombinedOptimizer:
    """An optimizer for all that backward does not step."""
    rest = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(dmp.named_parameters())), make)
    return CombinedOptimizer([dmp.fused_optimizer, rest])


def trained(
    generators: Callable[[], Generators],
    build: Callable[[], Model] = bags,
    in_backward: tuple[Any, dict[str, Any]] | None = (torch.optim.SGD, {"lr": 0.2}),
    dense: Callable[..., Any] = sgd,
    world: int = 2,
    weighted: bool = False,
) -> Any:
    """Losses of three steps and final weights, rank by rank."""

    def job(rank: int) -> Any:
        model = build()
        if in_backward is not None:
            apply_optimizer_in_backward(in_backward[0], model.tables.parameters(), in_backward[1])
        dmp = sharded(model, generators(), world)
        optimizer, losses = optimizer_of(dmp, dense), []
        for step in range(3):
            optimizer.zero_grad()
            loss, _ = dmp(batch(rank, step, weighted))
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return {"losses": losses, "weights": weights_of(dmp)}

    return on_ranks(world, job)


def each(make: Callable[[], Any]) -> Callable[[], Generators]:
    """The same scheme for both tables."""
    return lambda: {f"t_{f}": make() for f in FEATURES}


def by_rank() -> Generators:
    return {"t_a": table_wise(rank=0), "t_b": table_wise(rank=1)}


def by_columns() -> Generators:
    return {f"t_{f}": column_wise(ranks=[0, 1]) for f in FEATURES}


ADAGRAD = (torch.optim.Adagrad, {"lr": 0.2, "eps": 1e-3})
ROWWISE = (RowWiseAdagrad, {"lr": 0.2, "eps": 1e-3})


# ---- pooled collections ----


@case(DMP, EBC, f"{PLAN}.table_wise", IN_BACKWARD)
def bags_table_wise_sgd() -> Any:
    return trained(by_rank)


@case(DMP, EBC, f"{PLAN}.table_wise", "torchrec.optim.rowwise_adagrad.RowWiseAdagrad")
def bags_table_wise_rowwise_adagrad() -> Any:
    return trained(by_rank, in_backward=ROWWISE)


@case(DMP, EBC, f"{PLAN}.table_wise")
def bags_table_wise_adagrad() -> Any:
    return trained(by_rank, in_backward=ADAGRAD)


@case(DMP, EBC, f"{PLAN}.row_wise")
def bags_row_wise_sgd() -> Any:
    return trained(each(row_wise))


@case(DMP, EBC, f"{PLAN}.row_wise", "torchrec.optim.rowwise_adagrad.RowWiseAdagrad")
def bags_row_wise_rowwise_adagrad() -> Any:
    return trained(each(row_wise), in_backward=ROWWISE)


@case(DMP, EBC, f"{PLAN}.row_wise")
def bags_row_wise_adagrad() -> Any:
    return trained(each(row_wise), in_backward=ADAGRAD)


@case(DMP, EBC, f"{PLAN}.column_wise")
def bags_column_wise_sgd() -> Any:
    return trained(by_columns)


@case(DMP, EBC, f"{PLAN}.column_wise")
def bags_column_wise_adagrad() -> Any:
    return trained(by_columns, in_backward=ADAGRAD)


@case(
    DMP,
    f"{PLAN}.column_wise",
    "torchrec.optim.rowwise_adagrad.RowWiseAdagrad",
    differs="TorchRec keeps one norm per column shard; here it is the norm of the row, as unsharded",
)
def bags_column_wise_rowwise_adagrad() -> Any:
    return trained(by_columns, in_backward=ROWWISE)


@case(DMP, EBC, f"{PLAN}.data_parallel")
def bags_data_parallel_adam() -> Any:
    return trained(each(data_parallel), in_backward=None, dense=lambda p: torch.optim.Adam(p, lr=0.05))


@case(DMP, EBC, f"{PLAN}.table_row_wise")
def bags_table_row_wise_sgd() -> Any:
    return trained(each(lambda: table_row_wise(host_index=0)))


@case(DMP, EBC, f"{PLAN}.grid_shard")
def bags_grid_shard_sgd() -> Any:
    return trained(each(lambda: grid_shard(host_indexes=[0])))


@case(DMP, EBC, f"{PLAN}.table_wise", f"{PLAN}.row_wise")
def bags_mixed_plan_sgd() -> Any:
    return trained(lambda: {"t_a": table_wise(rank=1), "t_b": row_wise()})


@case(DMP, EBC, f"{PLAN}.column_wise", f"{PLAN}.data_parallel")
def bags_columns_beside_data_parallel() -> Any:
    return trained(
        lambda: {"t_a": column_wise(ranks=[1, 0]), "t_b": data_parallel()},
        in_backward=None,
        dense=lambda p: torch.optim.Adagrad(p, lr=0.1),
    )


@case(DMP, EBC, f"{PLAN}.construct_module_sharding_plan")
def bags_dense_kernel_and_the_users_adam() -> Any:
    return trained(by_rank, in_backward=None, dense=lambda p: torch.optim.Adam(p, lr=0.05))


@case(DMP, EBC, f"{PLAN}.row_wise")
def bags_dense_kernel_row_wise_with_momentum() -> Any:
    return trained(each(row_wise), in_backward=None, dense=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))


@case(DMP, EBC, "torchrec.modules.embedding_configs.PoolingType")
def bags_mean_row_wise() -> Any:
    return trained(each(row_wise), build=lambda: bags(PoolingType.MEAN))


@case(DMP, EBC, "torchrec.modules.embedding_configs.PoolingType")
def bags_mean_table_wise() -> Any:
    return trained(by_rank, build=lambda: bags(PoolingType.MEAN))


@case(DMP, EBC)
def bags_with_weights_table_wise() -> Any:
    return trained(by_rank, build=lambda: bags(is_weighted=True), weighted=True)


@case(DMP, EBC)
def bags_with_weights_row_wise() -> Any:
    return trained(each(row_wise), build=lambda: bags(is_weighted=True), weighted=True)


@case(DMP, EBC)
def one_table_for_two_features() -> Any:
    return trained(lambda: {"t_a": row_wise()}, build=shared, in_backward=ADAGRAD)


@case(DMP, EBC)
def one_rank() -> Any:
    return trained(lambda: {"t_a": table_wise(rank=0), "t_b": row_wise()}, world=1, in_backward=ROWWISE)


# ---- sequences ----


@case(DMP, EC, f"{PLAN}.table_wise")
def sequences_table_wise_sgd() -> Any:
    return trained(by_rank, build=sequences)


@case(DMP, EC, f"{PLAN}.row_wise")
def sequences_row_wise_sgd() -> Any:
    return trained(each(row_wise), build=sequences)


@case(DMP, EC, f"{PLAN}.row_wise", "torchrec.optim.rowwise_adagrad.RowWiseAdagrad")
def sequences_row_wise_rowwise_adagrad() -> Any:
    return trained(each(row_wise), build=sequences, in_backward=ROWWISE)


@case(DMP, EC, f"{PLAN}.column_wise")
def sequences_column_wise_adagrad() -> Any:
    return trained(by_columns, build=sequences, in_backward=ADAGRAD)


# ---- planner, pipelines, optimizers ----


def planned(schemes: dict[str, list[str]], steps: Callable[[nn.Module, Any, int], Any]) -> Any:
    """Runs `steps` on two ranks under the planner's plan."""

    def job(rank: int) -> Any:
        model = bags()
        apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 0.2})
        limits = {table: ParameterConstraints(sharding_types=types) for table, types in schemes.items()}
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=2, local_world_size=2, compute_device="cpu"), constraints=limits
        )
        plan = planner.collective_plan(model, sharders(), dist.group.WORLD)
        dmp = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders())
        set_tables(dmp)
        return {"steps": steps(dmp, optimizer_of(dmp), rank), "weights": weights_of(dmp)}

    return on_ranks(2, job)


def plain_loop(dmp: nn.Module, optimizer: Any, rank: int) -> list[Any]:
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss, _ = dmp(batch(rank, step))
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


def piped(kind: Any) -> Callable[..., list[Any]]:
    def steps(dmp: nn.Module, optimizer: Any, rank: int) -> list[Any]:
        pipeline = kind(dmp, optimizer, CPU)
        batches: Iterator[KeyedJaggedTensor] = iter([batch(rank, step) for step in range(4)])
        return outputs_of(pipeline, batches)

    return steps


TABLE_WISE = {f"t_{f}": ["table_wise"] for f in FEATURES}


@case("torchrec.distributed.planner.EmbeddingShardingPlanner", "torchrec.distributed.planner.Topology", DMP)
def planned_table_wise() -> Any:
    return planned(TABLE_WISE, plain_loop)


@case(f"{PIPELINE}.TrainPipelineSparseDist", DMP)
def pipeline_sparse_dist() -> Any:
    return planned(TABLE_WISE, piped(TrainPipelineSparseDist))


@case(f"{PIPELINE}.TrainPipelineBase", DMP)
def pipeline_base() -> Any:
    return planned(TABLE_WISE, piped(TrainPipelineBase))


@case("torchrec.optim.warmup.WarmupOptimizer", "torchrec.optim.warmup.WarmupStage", DMP, ranks=2)
def warmup_of_the_dense_layer(rank: int) -> Any:
    dmp = sharded(bags(), by_rank(), 2)
    rest = KeyedOptimizerWrapper(dict(dmp.named_parameters()), sgd)
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=2, value=0.1, lr_scale=2.0)]
    losses = plain_loop(dmp, WarmupOptimizer(rest, stages, lr=0.1), rank)
    return {"losses": losses, "weights": weights_of(dmp)}


@case("torchrec.optim.clipping.GradientClippingOptimizer", "torchrec.optim.clipping.GradientClipping", DMP, ranks=2)
def clipping_by_value(rank: int) -> Any:
    dmp = sharded(bags(), by_rank(), 2)
    rest = KeyedOptimizerWrapper(dict(dmp.named_parameters()), sgd)
    clipped = GradientClippingOptimizer(rest, clipping=GradientClipping.VALUE, max_gradient=0.05)
    return {"losses": plain_loop(dmp, clipped, rank), "weights": weights_of(dmp)}


# ---- state ----


@case(DMP, EBC, ranks=2)
def names_of_a_sharded_model(rank: int) -> Any:
    model = bags()
    apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 0.2})
    dmp = sharded(model, by_rank(), 2)
    return {
        "state": sorted(dmp.state_dict()),
        "others": sorted(dict(in_backward_optimizer_filter(dmp.named_parameters()))),
    }


@case(DMP, EBC, ranks=2)
def resuming_from_a_state_dict(rank: int) -> Any:
    first = sharded(bags(), by_rank(), 2)
    plain_loop(first, optimizer_of(first), rank)
    second = sharded(bags(), by_rank(), 2)
    second.load_state_dict(first.state_dict())
    loss, predicted = second(batch(rank, 3))
    return {"loss": loss, "predicted": predicted, "weights": weights_of(second)}


@case(DMP, EBC, ranks=2)
def evaluation_without_gradients(rank: int) -> Any:
    dmp = sharded(bags(), by_columns(), 2).eval()
    with torch.no_grad():
        loss, predicted = dmp(batch(rank, 0))
    return {"loss": loss, "predicted": predicted, "grad": predicted.requires_grad}


@case(DMP, EBC, ranks=2)
def one_rank_has_an_empty_batch(rank: int) -> Any:
    model = bags()
    apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 0.2})
    dmp = sharded(model, {"t_a": row_wise(), "t_b": table_wise(rank=0)}, 2)
    ids = torch.arange(8) % ROWS if rank else torch.empty(0, dtype=torch.int64)
    lengths = torch.tensor([2, 0, 1, 1, 3, 1]) if rank else torch.zeros(6, dtype=torch.int64)
    loss, predicted = dmp(KeyedJaggedTensor(keys=list(FEATURES), values=ids, lengths=lengths))
    loss.backward()
    return {"predicted": predicted, "weights": weights_of(dmp)}
