"""DistributedModelParallel: names, states, parameters, copies, on one and on two ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import get_module, get_unwrapped_module
from torchrec.distributed.sharding_plan import (
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.compat.parity.case import case, raised
from tests.compat.parity.sharded_tables import CPU, batch, configs, fill, plan_of

DMP = "torchrec.distributed.model_parallel.DistributedModelParallel"


class Model(nn.Module):
    """Tables "a" to "d" of 8 rows and 8 columns, and a layer with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=configs())
        self.over = nn.Linear(4, 1)
        self.register_buffer("seen", torch.tensor([3.0]))
        with torch.no_grad():
            self.over.weight.fill_(0.5)
            self.over.bias.fill_(0.25)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        values = self.bags(features).values()
        return self.over(values.view(-1, 4, 8).mean(2))


def generators(world_size: int) -> dict[str, Any]:
    columns = [0] if world_size == 1 else [0, 1]
    return {
        "a": row_wise(),
        "b": table_wise(rank=world_size - 1),
        "c": data_parallel(),
        "d": column_wise(ranks=columns),
    }


def model_on(world_size: int, fused: bool = True, **options: Any) -> DistributedModelParallel:
    model = Model()
    if fused:
        apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.1})
    plan = plan_of(model.bags, generators(world_size), world_size)
    dmp = DistributedModelParallel(model, device=CPU, plan=plan, **options)
    fill(dmp)
    return dmp


def tables(dmp: nn.Module, rank: int) -> Any:
    """The sum of each row of each table; None on other ranks than 0."""
    found = {}
    for name, value in sorted(dmp.state_dict().items()):
        if hasattr(value, "local_shards"):
            full = torch.zeros(value.size()) if rank == 0 else None
            value.gather(0, full)
            found[name] = None if full is None else full.sum(1)
        else:
            found[name] = value.sum(1) if value.dim() == 2 else value
    return found


@case(DMP, ranks=1)
def names_on_one_rank(rank: int) -> Any:
    dmp = model_on(1)
    return {
        "parameters": sorted(name for name, _ in dmp.named_parameters()),
        "with prefix": sorted(name for name, _ in dmp.named_parameters("model")),
        "buffers": sorted(name for name, _ in dmp.named_buffers()),
        "buffers with prefix": sorted(name for name, _ in dmp.named_buffers("model")),
        "bare": sorted(name for name, _ in dmp.bare_named_parameters()),
        "bare with prefix": sorted(name for name, _ in dmp.bare_named_parameters("model")),
        "sparse gradients": dmp.sparse_grad_parameter_names(),
        "state": sorted(dmp.state_dict()),
        "state with prefix": sorted(dmp.state_dict(prefix="model.")),
    }


@case(DMP, ranks=2)
def names_on_two_ranks(rank: int) -> Any:
    dmp = model_on(2)
    return {
        "parameters": sorted(name for name, own in dmp.named_parameters() if own.numel()),
        "buffers": sorted(name for name, _ in dmp.named_buffers()),
        "bare": sorted(name for name, own in dmp.bare_named_parameters() if own.numel()),
        "sparse gradients": dmp.sparse_grad_parameter_names(["x"], "model"),
        "state": sorted(dmp.state_dict()),
        "state with prefix": sorted(dmp.state_dict(prefix="model.")),
    }


@case(DMP, ranks=2)
def the_plan_of_a_model(rank: int) -> Any:
    dmp = model_on(2)
    assert dmp._plan is dmp.plan
    return {
        path: {name: [entry.sharding_type, entry.ranks] for name, entry in sorted(tables.items())}
        for path, tables in dmp._plan.plan.items()
    }


@case(DMP, ranks=2)
def tables_on_the_dense_kernel(rank: int) -> Any:
    dmp = model_on(2, fused=False)
    return {
        "sparse gradients": dmp.sparse_grad_parameter_names(),
        "shapes": {name: list(own.shape) for name, own in sorted(dmp.named_parameters()) if own.numel()},
    }


@case(DMP, ranks=1)
def a_state_dict_into_a_destination(rank: int) -> Any:
    dmp, destination = model_on(1), {}
    found = dmp.state_dict(destination, "m.", False)
    return {"same": found is destination, "names": sorted(found)}


@case(DMP, ranks=2)
def loading_a_state_dict(rank: int) -> Any:
    dmp = model_on(2)
    state = dmp.state_dict()
    with torch.no_grad():
        for value in state.values():
            for own in value.local_shards() if hasattr(value, "local_shards") else ():
                own.tensor.fill_(rank + 2.0)
        dmp.module.over.weight.fill_(9.0)
    other = model_on(2)
    other.load_state_dict(state)
    return tables(other, rank)


@case(DMP, ranks=1)
def a_name_that_is_missing(rank: int) -> Any:
    dmp = model_on(1)
    state = dict(dmp.state_dict())
    state.pop("over.bias")
    state["unknown"] = torch.zeros(1)
    dmp.load_state_dict(state, strict=False)
    return raised(lambda: dmp.load_state_dict(state))


@case(DMP, ranks=1)
def loading_names_with_a_prefix(rank: int) -> Any:
    dmp = model_on(1)
    state = {f"m.{name}": value for name, value in dmp.state_dict().items()}
    return raised(lambda: dmp.load_state_dict(state)) != "nothing"


@case(DMP, ranks=2)
def parts_of_a_wrapped_model(rank: int) -> Any:
    dmp = model_on(2)
    wrapped = dmp._dmp_wrapped_module
    return {
        "module": type(dmp.module).__name__,
        "wrapped": isinstance(wrapped, DistributedDataParallel),
        "unwrapped": get_unwrapped_module(wrapped) is dmp.module,
        "of dmp": type(get_unwrapped_module(dmp)).__name__,
        "get_module of dmp": get_module(dmp) is dmp,
        "get_module of ddp": get_module(wrapped) is wrapped,
        "sharded": type(dmp.module.bags).__name__,
        "plan": sorted(dmp.plan.plan["bags"]),
        "training": dmp.training,
    }


@case(DMP, ranks=2)
def the_dense_part_is_replicated_later(rank: int) -> Any:
    dmp = model_on(2, init_data_parallel=False)
    before = type(dmp._dmp_wrapped_module).__name__
    dmp.init_data_parallel()
    wrapped = dmp._dmp_wrapped_module
    dmp.init_data_parallel()
    return {
        "before": before,
        "after": isinstance(wrapped, DistributedDataParallel),
        "once": wrapped is dmp._dmp_wrapped_module,
    }


class Late(nn.Module):
    """Dense parameters on meta, which are drawn by `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@case(DMP, ranks=1)
def dense_parameters_on_meta(rank: int) -> Any:
    made = DistributedModelParallel(Late(), device=CPU, plan=ShardingPlan({}), init_data_parallel=False)
    return {"device": str(made.module.layer.weight.device), "shape": list(made.module.layer.weight.shape)}


@case(DMP, ranks=2)
def a_step_on_two_ranks(rank: int) -> Any:
    dmp = model_on(2)
    dense = KeyedOptimizerWrapper(dict(dmp.named_parameters()), lambda own: torch.optim.SGD(own, lr=0.1))
    outputs = []
    for _ in range(2):
        dense.zero_grad()
        output = dmp(batch(rank))
        output.sum().backward()
        dense.step()
        outputs.append(output)
    return {"outputs": outputs, **tables(dmp, rank)}


@case(DMP, differs="TorchRec's needs NCCL and copies no Gloo group; here it copies the model", ranks=1)
def a_copy_on_the_same_device(rank: int) -> Any:
    dmp = model_on(1)
    return raised(lambda: dmp.copy(CPU))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.rows = nn.EmbeddingBag(3, 2, sparse=True), nn.Embedding(3, 2)
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True))


@case(DMP, ranks=1)
def weights_with_sparse_gradients(rank: int) -> Any:
    dmp = DistributedModelParallel(Sparse(), device=CPU, plan=ShardingPlan({}), init_data_parallel=False)
    return [dmp.sparse_grad_parameter_names(), dmp.sparse_grad_parameter_names(["x"], "p")]


@case(DMP, ranks=2)
def the_fused_optimizer(rank: int) -> Any:
    dmp = model_on(2)
    return {
        "rates": sorted({round(float(group["lr"]), 6) for group in dmp.fused_optimizer.param_groups}),
    }


@case(DMP, "torchrec.distributed.ShardingEnv", ranks=2)
def an_environment_is_passed(rank: int) -> Any:
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    model = Model()
    dmp = DistributedModelParallel(
        model, env, CPU, plan_of(model.bags, generators(2)), [EmbeddingBagCollectionSharder()]
    )
    fill(dmp)
    return {"world": env.world_size, "rank": env.rank, "output": dmp(batch(rank))}
