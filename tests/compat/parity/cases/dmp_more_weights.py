"""First weights of sharded tables: init_fn, the range of draws, replicas, dense layers."""

from typing import Any

import torch
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import data_parallel, row_wise, table_wise
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.compat.parity.case import case
from tests.compat.parity.cases.dmp import DMP
from tests.compat.parity.sharded_tables import CPU, configs, plan_of

GENERATORS = {"a": row_wise(), "b": table_wise(rank=1), "c": data_parallel()}


def sharded(device: str, **fields: Any) -> DistributedModelParallel:
    bags = EmbeddingBagCollection(tables=configs("abc", dim=4, **fields), device=torch.device(device))
    model = nn.ModuleDict({"bags": bags, "over": nn.Linear(4, 2)})
    return DistributedModelParallel(model, device=CPU, plan=plan_of(bags, GENERATORS))


def shards(dmp: nn.Module) -> dict[str, Any]:
    """The local shards of each table, and the dense part."""
    return {
        name: [own.tensor for own in value.local_shards()] if hasattr(value, "local_shards") else value
        for name, value in sorted(dmp.state_dict().items())
    }


def rising(weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return weight.copy_(torch.arange(float(weight.shape[-1])).expand_as(weight))


def tables(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if "embedding_bags" in name}


@case(DMP, ranks=2)
def an_init_fn_fills_the_shards(rank: int) -> Any:
    return tables(shards(sharded("cpu", init_fn=rising)))


@case(DMP, ranks=2)
def the_dense_part_is_that_of_rank_0(rank: int) -> Any:
    torch.manual_seed(rank)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        EmbeddingBagCollection(tables=configs("abc", dim=4))
        expected = nn.Linear(4, 2)
    found = shards(sharded("cpu"))
    return [bool(torch.equal(found["over.weight"], expected.weight)), found["over.weight"]]


@case(DMP, differs="tables begin with rank 0's unsharded weights; TorchRec draws each shard anew on its rank", ranks=2)
def weights_of_the_unsharded_model(rank: int) -> Any:
    torch.manual_seed(3)
    return tables(shards(sharded("cpu")))["bags.embedding_bags.a.weight"][0][0]
