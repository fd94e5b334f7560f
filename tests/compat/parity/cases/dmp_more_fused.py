"""Fused collections without sharding: their optimizer, its learning rate and states, the place of their tables."""

from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    fuse_embedding_optimizer,
)
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.compat.parity.case import case, raised

FUSED = "torchrec.modules.fused_embedding_modules.FusedEmbeddingBagCollection"
SEQUENCES = "torchrec.modules.fused_embedding_modules.FusedEmbeddingCollection"
FUSE = "torchrec.modules.fused_embedding_modules.fuse_embedding_optimizer"
CPU = torch.device("cpu")


class Location:
    """Looks like fbgemm's location of a name."""

    def __init__(self, name: str) -> None:
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation

        self.value = EmbeddingLocation[name]


def configs() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=[f"f_{name}"])
        for name, rows in (("a", 4), ("b", 3))
    ]


def fused(optimizer: Any = torch.optim.Adagrad, **options: Any) -> FusedEmbeddingBagCollection:
    module = FusedEmbeddingBagCollection(configs(), optimizer, {"lr": 0.5}, **options)
    with torch.no_grad():
        for value in module.state_dict().values():
            value.copy_(torch.arange(float(value.numel())).view(value.shape) / 8)
    return module


def batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f_a", "f_b"], torch.tensor([0, 1, 2, 1]), lengths=torch.tensor([1, 1, 1, 1]))


@case(FUSED, "torchrec.optim.fused.FusedOptimizerModule")
def the_optimizer_of_fused_tables() -> Any:
    module = fused()
    own = module.fused_optimizer()
    return {
        "keyed": isinstance(own, KeyedOptimizer),
        "module": isinstance(module, FusedOptimizerModule),
        "params": {name: list(value.shape) for name, value in own.params.items()},
        "state": {name: sorted(entry) for name, entry in own.state_dict()["state"].items()},
        "rates": [round(float(group["lr"]), 6) for group in own.param_groups],
        "same": module.fused_optimizer() is own,
    }


@case(FUSED)
def states_follow_backward() -> Any:
    module = fused()
    module(batch()).values().sum().backward()
    return [module.fused_optimizer().state_dict(), module.state_dict()]


@case(FUSED)
def states_of_row_wise_adagrad() -> Any:
    module = fused(RowWiseAdagrad)
    module(batch()).values().sum().backward()
    return module.fused_optimizer().state_dict()


@case(FUSED)
def sgd_has_no_state() -> Any:
    return fused(torch.optim.SGD).fused_optimizer().state_dict()


@case(FUSED)
def a_new_learning_rate() -> Any:
    module = fused(torch.optim.SGD)
    own = module.fused_optimizer()
    for group in own.param_groups:
        group["lr"] = 2.0
    own.zero_grad()
    module(batch()).values().sum().backward()
    own.step()
    return module.state_dict()


@case(FUSED)
def a_scheduler() -> Any:
    module = fused(torch.optim.SGD)
    own = module.fused_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(own, step_size=1, gamma=0.5)
    rates = []
    for _ in range(3):
        own.zero_grad()
        module(batch()).values().sum().backward()
        own.step()
        scheduler.step()
        rates.append(round(float(own.param_groups[0]["lr"]), 6))
    return {"rates": rates, **module.state_dict()}


@case(FUSED)
def states_are_loaded() -> Any:
    one, other = fused(), fused()
    one(batch()).values().sum().backward()
    other.fused_optimizer().load_state_dict(one.fused_optimizer().state_dict())
    other.load_state_dict(one.state_dict())
    for module in (one, other):
        module(batch()).values().sum().backward()
    return [one.state_dict(), other.state_dict()]


@case(FUSED, "torchrec.optim.keyed.CombinedOptimizer")
def fused_and_dense_together() -> Any:
    module, over = fused(), nn.Linear(8, 1, bias=False)
    with torch.no_grad():
        over.weight.fill_(0.5)
    dense = KeyedOptimizerWrapper(dict(over.named_parameters()), lambda own: torch.optim.SGD(own, lr=0.1))
    both = CombinedOptimizer([("tables", module.fused_optimizer()), ("over", dense)])
    both.zero_grad()
    over(module(batch()).values()).sum().backward()
    both.step()
    return {"params": sorted(both.params), "weight": over.weight, **module.state_dict()}


@case(FUSED)
def tables_in_host_memory() -> Any:
    module = fused(device=CPU, location=Location("HOST").value)
    return [str(module.device), module(batch()).values()]


@case(FUSED)
def a_location_that_a_cpu_does_not_have() -> Any:
    return [
        raised(lambda name=name: fused(device=CPU, location=Location(name).value)) != "nothing"
        for name in ("DEVICE", "MANAGED", "MANAGED_CACHING")
    ]


@case(FUSED)
def positional_arguments() -> Any:
    module = FusedEmbeddingBagCollection(configs(), torch.optim.SGD, {"lr": 0.5}, False, CPU, Location("HOST").value)
    return [module.is_weighted(), str(module.device), module.optimizer_type().__name__, module.optimizer_kwargs()]


@case(FUSE)
def tables_are_fused_in_host_memory() -> Any:
    model = nn.Sequential(EmbeddingBagCollection(tables=configs()))
    made = fuse_embedding_optimizer(model, torch.optim.Adagrad, {"lr": 0.5}, CPU, Location("HOST").value)
    return [type(made[0]).__name__, sorted(made[0].fused_optimizer().params)]


@case(SEQUENCES, differs="TorchRec's sequence tables need CUDA; here they are on CPUs too")
def the_optimizer_of_sequence_tables() -> Any:
    config = EmbeddingConfig(name="a", num_embeddings=4, embedding_dim=4, feature_names=["f_a"])
    return raised(lambda: FusedEmbeddingCollection([config], torch.optim.SGD, {"lr": 0.5}).fused_optimizer())
