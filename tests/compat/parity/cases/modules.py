"""Collections, MLP, cross networks, DeepFM, regrouping, lazy modules: first weights, names and outputs."""

from typing import Any

import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet, VectorCrossNet
from torchrec.modules.deepfm import DeepFM, FactorizationMachine
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
)
from torchrec.modules.mlp import MLP
from torchrec.modules.regroup import KTRegroupAsDict

from tests.compat.parity.case import case, raised

BAGS, MODULES = "torchrec.modules.embedding_modules", "torchrec.modules"


def bag(name: str, features: list[str], rows: int = 5, **fields: Any) -> Any:
    return EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=rows, feature_names=features, **fields)


def sequence(name: str, features: list[str], rows: int = 5, **fields: Any) -> Any:
    return EmbeddingConfig(name=name, embedding_dim=4, num_embeddings=rows, feature_names=features, **fields)


def ids() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2, 3, 0]), lengths=torch.tensor([2, 0, 1, 1]))


def drawn(module: nn.Module) -> dict[str, Any]:
    """All weights, and the next random number."""
    return {**module.state_dict(), "next": torch.rand(1)}


def given(module: nn.Module) -> Any:
    """The module with weights 0.1, 0.2, ..."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_((torch.arange(weight.numel()) + 1.0).reshape(weight.shape) / 10)
    return module


@case(f"{BAGS}.EmbeddingBagCollection")
def bags_first_weights() -> Any:
    return drawn(EmbeddingBagCollection([bag("a", ["f"]), bag("b", ["g"], 6)]))


@case(f"{BAGS}.EmbeddingBagCollection")
def bags_first_weights_of_init_fn() -> Any:
    tables = [bag("a", ["f"], init_fn=nn.init.xavier_normal_), bag("b", ["g"], init_fn=nn.init.zeros_)]
    return drawn(EmbeddingBagCollection(tables))


@case(f"{BAGS}.EmbeddingBagCollection")
def bags_on_meta_use_no_random_numbers() -> Any:
    module = EmbeddingBagCollection([bag("a", ["f"])], device=torch.device("meta"))
    return {"device": module.device.type, "next": torch.rand(1)}


@case(f"{BAGS}.EmbeddingBagCollection")
def bags_pooled() -> Any:
    tables = [bag("a", ["f", "g"]), bag("b", ["g"], pooling=PoolingType.MEAN)]
    return given(EmbeddingBagCollection(tables))(ids())


@case(f"{BAGS}.EmbeddingBagCollection")
def bags_weighted() -> Any:
    module = given(EmbeddingBagCollection([bag("a", ["f"])], is_weighted=True))
    kjt = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([2, 0]), weights=torch.tensor([0.5, 2.0]))
    return {"out": module(kjt), "weighted": module.is_weighted()}


@case(f"{BAGS}.EmbeddingBagCollection")
def bags_gradients() -> Any:
    module = given(EmbeddingBagCollection([bag("a", ["f", "g"])]))
    module(ids()).values().square().sum().backward()
    return module.embedding_bags["a"].weight.grad


@case(f"{BAGS}.EmbeddingBagCollection")
def bags_of_one_name_twice() -> Any:
    return raised(lambda: EmbeddingBagCollection([bag("a", ["f"]), bag("a", ["g"])]))


@case(f"{BAGS}.EmbeddingBagCollection")
def bags_configs() -> Any:
    module = EmbeddingBagCollection([bag("a", ["f"]), bag("b", ["g"])])
    return [[c.name, c.num_embeddings, c.embedding_dim, c.feature_names] for c in module.embedding_bag_configs()]


@case(f"{BAGS}.EmbeddingCollection")
def rows_first_weights() -> Any:
    return drawn(EmbeddingCollection([sequence("a", ["f"]), sequence("b", ["g"], 6)]))


@case(f"{BAGS}.EmbeddingCollection")
def rows_first_weights_of_init_fn() -> Any:
    return drawn(EmbeddingCollection([sequence("a", ["f"], init_fn=nn.init.xavier_normal_), sequence("b", ["g"])]))


@case(f"{BAGS}.EmbeddingCollection")
def rows_looked_up() -> Any:
    module = given(EmbeddingCollection([sequence("a", ["f", "g"])], need_indices=True))
    return {**module(ids()), "dim": module.embedding_dim(), "names": module.embedding_names_by_table()}


@case(f"{BAGS}.EmbeddingCollection")
def rows_of_a_feature_in_two_tables() -> Any:
    module = given(EmbeddingCollection([sequence("a", ["f"]), sequence("b", ["f", "g"])]))
    return {**module(ids()), "need_indices": module.need_indices()}


@case(f"{MODULES}.mlp.MLP")
def mlp_first_weights() -> Any:
    return drawn(MLP(3, [4, 2]))


@case(f"{MODULES}.crossnet.CrossNet", f"{MODULES}.crossnet.VectorCrossNet")
def cross_networks() -> Any:
    full, vector = CrossNet(3, 2), VectorCrossNet(3, 2)
    return {"full": drawn(full), "vector": drawn(vector), "out": [m(torch.ones(2, 3)) for m in (full, vector)]}


@case(f"{MODULES}.crossnet.LowRankCrossNet")
def low_rank_cross_network() -> Any:
    module = LowRankCrossNet(3, 2, low_rank=2)
    return {**drawn(module), "out": module(torch.ones(2, 3))}


@case(f"{MODULES}.deepfm.DeepFM", f"{MODULES}.deepfm.FactorizationMachine")
def deepfm_parts() -> Any:
    inputs = [torch.rand(2, 3), torch.rand(2, 2, 2)]
    module = DeepFM(nn.Linear(7, 2))
    return {"deep": module(inputs), "fm": FactorizationMachine()(inputs), "names": list(module.state_dict())}


@case(f"{MODULES}.regroup.KTRegroupAsDict")
def regrouped() -> Any:
    module = KTRegroupAsDict([["b"], ["a", "c"]], ["x", "y"])
    tensors = [
        KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).reshape(2, 3)),
        KeyedTensor(["c"], [2], torch.arange(4.0).reshape(2, 2)),
    ]
    return {**module(tensors), "again": module(tensors)["y"]}


@case(f"{MODULES}.fused_embedding_modules.FusedEmbeddingBagCollection")
def fused_tables_step_in_backward() -> Any:
    module = FusedEmbeddingBagCollection([bag("a", ["f"]), bag("b", ["g"])], torch.optim.SGD, {"lr": 0.5})
    first = drawn(module)
    module(ids()).values().sum().backward()
    return {**first, "after": module.state_dict(), "type": module.optimizer_type(), "kwargs": module.optimizer_kwargs()}
