"""torch.fx, torch.export and torch.jit over modules that take a KeyedJaggedTensor."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.types import LazyNoWait, NoWait
from torchrec.fx import symbolic_trace
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.regroup import KTRegroupAsDict

from tests.compat.parity.case import case, raised

TRACER = "torchrec.fx.tracer.symbolic_trace"
EBC = "torchrec.modules.embedding_modules.EmbeddingBagCollection"


def batch(size: int, weighted: bool = False) -> KeyedJaggedTensor:
    lengths = torch.arange(2 * size) % 3
    count = int(lengths.sum())
    weights = torch.arange(float(count)) if weighted else None
    return KeyedJaggedTensor(["a", "b"], torch.arange(count) % 10, weights, lengths)


def dense(size: int) -> Tensor:
    return torch.arange(4.0 * size).reshape(size, 4) / 10


def filled(module: nn.Module) -> nn.Module:
    """The module with parameters that depend on their size only."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
    return module


def pooled(weighted: bool = False) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=10, feature_names=["a"]),
        EmbeddingBagConfig(name="u", embedding_dim=4, num_embeddings=10, feature_names=["b"]),
    ]
    return EmbeddingBagCollection(tables=tables, is_weighted=weighted)


def sequences() -> EmbeddingCollection:
    return EmbeddingCollection(
        tables=[EmbeddingConfig(name="t", embedding_dim=3, num_embeddings=10, feature_names=["a", "b"])]
    )


class Grouped(nn.Module):
    """A collection whose output is grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.collection = pooled()
        self.regroup = KTRegroupAsDict([["b", "a"], ["a"]], ["both", "one"])

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        groups = self.regroup([self.collection(features)])
        return torch.cat([groups["both"], groups["one"]], dim=1)


def processed() -> FeatureProcessedEmbeddingBagCollection:
    return FeatureProcessedEmbeddingBagCollection(pooled(True), PositionWeightedModuleCollection({"a": 4, "b": 4}))


def dlrm() -> DLRM:
    return DLRM(pooled(), 4, [8, 4], [8, 1])


def dcn() -> DLRM_DCN:
    return DLRM_DCN(pooled(), 4, [8, 4], [8, 1], 2, 4)


def deepfm() -> SimpleDeepFMNN:
    return SimpleDeepFMNN(
        num_dense_features=4, embedding_bag_collection=pooled(), hidden_layer_size=8, deep_fm_dimension=3
    )


def leaves(output: Any) -> Any:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def traced(build: Callable[[], nn.Module], arguments: Callable[[int], tuple[Any, ...]]) -> Any:
    """Output of the traced module for two batch sizes, and whether the module itself gives the same."""
    module = filled(build())
    eager = [leaves(module(*arguments(size)))[:1] for size in (2, 3)]
    graph = symbolic_trace(module)
    outputs = [leaves(graph(*arguments(size)))[:1] for size in (2, 3)]
    return [outputs, all(torch.allclose(one[0], two[0]) for one, two in zip(outputs, eager, strict=True))]


def exported(build: Callable[[], nn.Module], arguments: Callable[[int], tuple[Any, ...]]) -> Any:
    """Output of the exported program, non-strict and strict, and whether the module itself gives the same."""
    module = filled(build())
    outputs = [
        leaves(torch.export.export(module, arguments(2), strict=strict).module()(*arguments(2)))[0]
        for strict in (False, True)
    ]
    eager = leaves(module(*arguments(2)))[0]
    return [outputs[0], *(torch.allclose(output, eager) for output in outputs)]


def ids(size: int) -> tuple[Any, ...]:
    return (batch(size),)


def weighted_ids(size: int) -> tuple[Any, ...]:
    return (batch(size, weighted=True),)


def both(size: int) -> tuple[Any, ...]:
    return dense(size), batch(size)


@case(TRACER, EBC)
def fx_of_a_pooled_collection() -> Any:
    return [traced(pooled, ids), traced(lambda: pooled(True), weighted_ids)]


@case(TRACER, "torchrec.modules.embedding_modules.EmbeddingCollection")
def fx_of_a_sequence_collection() -> Any:
    return traced(sequences, ids)


@case(TRACER, "torchrec.models.dlrm.DLRM")
def fx_of_dlrm() -> Any:
    return traced(dlrm, both)


@case(TRACER, "torchrec.models.dlrm.DLRM_DCN")
def fx_of_dlrm_dcn() -> Any:
    return traced(dcn, both)


@case(TRACER, "torchrec.models.deepfm.SimpleDeepFMNN")
def fx_of_deepfm() -> Any:
    return traced(deepfm, both)


@case(TRACER, "torchrec.modules.fp_embedding_modules.FeatureProcessedEmbeddingBagCollection")
def fx_of_position_weights() -> Any:
    return traced(processed, ids)


def processed_apart() -> FeatureProcessedEmbeddingBagCollection:
    processors = {"a": PositionWeightedModule(4), "b": PositionWeightedModule(4)}
    return FeatureProcessedEmbeddingBagCollection(pooled(True), processors)


@case(TRACER, "torchrec.modules.fp_embedding_modules.FeatureProcessedEmbeddingBagCollection")
def fx_and_export_of_one_processor_a_feature() -> Any:
    return [traced(processed_apart, ids), exported(processed_apart, ids)]


@case(TRACER, "torchrec.modules.regroup.KTRegroupAsDict")
def fx_of_regrouping() -> Any:
    return traced(Grouped, ids)


@case(EBC)
def export_of_a_pooled_collection() -> Any:
    return [exported(pooled, ids), exported(lambda: pooled(True), weighted_ids)]


@case("torchrec.modules.embedding_modules.EmbeddingCollection")
def export_of_a_sequence_collection() -> Any:
    return exported(sequences, ids)


@case("torchrec.models.dlrm.DLRM")
def export_of_dlrm() -> Any:
    return exported(dlrm, both)


@case("torchrec.models.dlrm.DLRM_DCN")
def export_of_dlrm_dcn() -> Any:
    return exported(dcn, both)


@case("torchrec.fx.tracer.Tracer", TRACER)
def concrete_arguments() -> Any:
    class Scales(nn.Module):
        def forward(self, x: Tensor, twice: bool) -> Tensor:
            return 2 * x if twice else x

    graphs = [symbolic_trace(Scales(), concrete_args={"twice": twice}) for twice in (False, True)]
    return [graph(torch.ones(2), twice) for graph, twice in zip(graphs, (False, True), strict=True)]


@case("torchrec.fx.tracer.Tracer", "torchrec.distributed.types.NoWait", "torchrec.distributed.types.LazyNoWait")
def awaitables_in_a_graph() -> Any:
    class Returns(nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.kind = kind

        def forward(self, x: Tensor) -> Any:
            return self.kind(x + 1)

    eager, lazy = symbolic_trace(Returns(NoWait)), symbolic_trace(Returns(LazyNoWait))
    found = eager(torch.ones(1))
    return [type(found).__name__, found.wait(), lazy(torch.ones(1)) + 0]


@case(TRACER, "torchrec.models.dlrm.DLRMTrain")
def fx_of_a_model_with_its_loss() -> Any:
    graph = symbolic_trace(DLRMTrain(dlrm()))
    return [isinstance(graph, fx.GraphModule), [node.name for node in graph.graph.find_nodes(op="placeholder")]]


@case(TRACER, "torchrec.distributed.model_parallel.DistributedModelParallel", ranks=2)
def fx_of_a_model_on_ranks(rank: int) -> Any:
    from torchrec.distributed import DistributedModelParallel

    model = DistributedModelParallel(filled(dlrm()), device=torch.device("cpu"))
    with torch.no_grad():
        return torch.allclose(symbolic_trace(model)(*both(3)), model(*both(3)))


@case(EBC, differs="torch.jit.script is refused: torch 2.13 deprecates it, and torch.export takes the same modules")
def script_of_a_collection() -> Any:
    return raised(lambda: torch.jit.script(pooled()))
