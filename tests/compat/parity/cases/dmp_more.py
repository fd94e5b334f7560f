"""DistributedModelParallel: tables that a rank has no shard of, several shards on a rank, orders of names."""

from typing import Any

import torch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.compat.parity.case import case
from tests.compat.parity.cases.dmp import DMP, Model, tables
from tests.compat.parity.sharded_tables import CPU, batch, fill, plan_of


def model_on(fused: bool = True, optimizer: Any = torch.optim.SGD, **shardings: Any) -> DistributedModelParallel:
    """On two ranks: "a" is on rank 0 and "b" on rank 1, "c" is replicated, "d" has row shards."""
    model = Model()
    if fused:
        apply_optimizer_in_backward(optimizer, model.bags.parameters(), {"lr": 0.1})
    generators = {"a": table_wise(rank=0), "b": table_wise(rank=1), "c": data_parallel(), "d": row_wise()} | shardings
    dmp = DistributedModelParallel(model, device=CPU, plan=plan_of(model.bags, generators))
    fill(dmp)
    return dmp


@case(DMP, "torchrec.optim.optimizers.in_backward_optimizer_filter", ranks=2)
def parameters_that_backward_steps(rank: int) -> Any:
    own = model_on()
    return {
        "dense": [name for name, _ in in_backward_optimizer_filter(own.named_parameters())],
        "fused": [name for name, _ in in_backward_optimizer_filter(own.named_parameters(), include=True)],
    }


@case(DMP, "torchrec.optim.keyed.KeyedOptimizerWrapper", ranks=2)
def an_optimizer_over_empty_parameters(rank: int) -> Any:
    dmp = model_on(fused=False)
    own = KeyedOptimizerWrapper(dict(dmp.named_parameters()), lambda own: torch.optim.Adagrad(own, lr=0.1))
    for _ in range(2):
        own.zero_grad()
        dmp(batch(rank)).sum().backward()
        own.step()
    gradients = {name: None if value.grad is None else True for name, value in dmp.named_parameters()}
    return {"gradients": gradients, "names": sorted(own.params), **tables(dmp, rank)}


@case(DMP, "torchrec.optim.keyed.CombinedOptimizer", ranks=2)
def names_of_a_combined_optimizer(rank: int) -> Any:
    dmp = model_on()
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())), lambda own: torch.optim.SGD(own, lr=0.1)
    )
    both = CombinedOptimizer([dmp.fused_optimizer, dense])
    return [sorted(dense.params), len(both.optimizers)]


@case(DMP, ranks=2)
def a_state_dict_has_every_table_once(rank: int) -> Any:
    state = model_on(b=column_wise(ranks=[1, 1])).state_dict()
    return {name: list(value.size()) for name, value in sorted(state.items())}


@case(
    DMP, differs="the fused optimizer has every table on all ranks; TorchRec omits those without a local shard", ranks=2
)
def tables_of_the_fused_optimizer(rank: int) -> Any:
    own = model_on(optimizer=torch.optim.Adagrad).fused_optimizer
    return [sorted(own.params), sorted(own.state_dict()["state"])]


@case(DMP, ranks=2)
def states_of_the_fused_optimizer(rank: int) -> Any:
    own = model_on(optimizer=torch.optim.Adagrad).fused_optimizer
    table = "bags.embedding_bags.d.weight"
    states = own.state_dict()["state"][table]
    return {name: list(value.size()) for name, value in states.items()} | {"rates": sorted(
        {float(group["lr"]) for group in own.param_groups}
    )}  # fmt: skip
