"""torch.compile takes a batch into one graph, and torch.fx traces code that builds and reads batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import recshard_lab as rs
from recshard_lab.embedding import KTRegroupAsDict
from recshard_lab.models import (
    DLRM_DCN,
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModuleCollection,
    SimpleDeepFMNN,
)
from recshard_lab.sparse import KeyedJaggedTensor, KeyedTensor
from tests.grid import grid


def batch(size: int, variable: bool = False) -> KeyedJaggedTensor:
    torch.manual_seed(size)
    strides = [[size - 1], [size]] if variable else [[size], [size]]
    lengths = torch.randint(0, 4, (sum(ranks[0] for ranks in strides),))
    return KeyedJaggedTensor(
        ["a", "b"],
        torch.randint(0, 10, (int(lengths.sum()),)),
        lengths=lengths,
        stride_per_key_per_rank=strides if variable else None,
        inverse_indices=(["a", "b"], torch.randint(0, size - 1, (2, size + 1))) if variable else None,
    )


POOLED = [
    rs.EmbeddingBagConfig(10, 8, "t", feature_names=["a", "b"]),
    rs.EmbeddingBagConfig(10, 4, "u", feature_names=["a"]),
]
CALLS: dict[str, Callable[[KeyedJaggedTensor], Tensor]] = {
    "values": lambda kjt: kjt.values() + 1,
    "item": lambda kjt: kjt["b"].values() + 1,
    "to_dict": lambda kjt: kjt.to_dict()["b"].offsets() + 1,
    "permute": lambda kjt: kjt.permute([1, 0]).values() + 1,
    "split": lambda kjt: kjt.split([1, 1])[1].lengths() + 1,
    "concat": lambda kjt: KeyedJaggedTensor.concat([kjt.permute([1]), kjt.permute([0])]).values() + 1,
    "build": lambda kjt: KeyedJaggedTensor(["a", "b"], kjt.values() + 1, lengths=kjt.lengths()).values(),
    "from_jt_dict": lambda kjt: KeyedJaggedTensor.from_jt_dict({"x": kjt["a"], "y": kjt["b"]}).values() + 1,
    "padded": lambda kjt: kjt["a"].to_padded_dense(3) + 1,
}


@pytest.mark.parametrize(*grid(synced=[False, True], gate={"synced": [True]}))
def test_a_method_is_one_graph_for_batches_of_any_size(synced: bool) -> None:
    for name, call in CALLS.items():
        torch._dynamo.reset()
        compiled = torch.compile(call, backend="eager", fullgraph=True)
        for size in (3, 5):
            kjt = batch(size)
            wanted = call(kjt)
            assert torch.equal(compiled(kjt if synced else kjt.unsync()), wanted), name


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pooled = rs.EmbeddingBagCollection(POOLED)
        self.sequence = rs.EmbeddingCollection([rs.EmbeddingConfig(10, 4, "s", feature_names=["a"])])
        self.regroup = KTRegroupAsDict([["b", "a@u"], ["a@t"]], ["user", "item"])
        self.over = nn.Linear(12, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.pooled(features)
        groups = self.regroup([pooled])
        whole = KeyedTensor.regroup([pooled], [["a@t", "b"]])
        rows = self.sequence(features)["a"].to_padded_dense(2)
        return self.over(groups["user"]).sum() + groups["item"].square().sum() + whole[0].sum() + rows.sum()


@pytest.mark.parametrize(("backend", "variable"), [("eager", True), ("aot_eager", False)])
def test_a_model_with_collections_is_one_graph_and_trains_alike(backend: str, variable: bool) -> None:
    torch._dynamo.reset()
    model = Model()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for size in (3, 5):
        kjt = batch(size, variable)
        gradients = []
        for run in (model, compiled):
            model.zero_grad()
            output = run(kjt)
            output.backward()
            gradients.append([output, *(parameter.grad for parameter in model.parameters())])
        torch.testing.assert_close(*gradients)


def test_a_compiled_lookup_still_refuses_an_id_that_is_no_row() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(rs.EmbeddingBagCollection(POOLED), backend="eager", fullgraph=True)
    wrong = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 10]), lengths=torch.tensor([1, 1]))
    with pytest.raises(RuntimeError, match="feature 'b' has an id that is not a row of table 't'"):
        compiled(wrong)


def test_a_traced_model_does_the_same_for_other_batches() -> None:
    model: Any = Model()
    traced = fx.symbolic_trace(model)
    for size in (3, 5):
        torch.testing.assert_close(traced(batch(size)), model(batch(size)))
    assert {node.op for node in traced.graph.nodes} >= {"placeholder", "call_function", "call_module", "get_attr"}


def weighted(size: int) -> KeyedJaggedTensor:
    kjt = batch(size)
    return KeyedJaggedTensor(kjt.keys(), kjt.values(), torch.rand(kjt.values().shape[0]), kjt.lengths())


def with_numbers(size: int) -> tuple[Any, ...]:
    return torch.rand(size, 3), batch(size)


EXPORTED: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "pooled": (lambda: rs.EmbeddingBagCollection(POOLED), lambda size: (batch(size),)),
    "weighted": (lambda: rs.EmbeddingBagCollection(POOLED, is_weighted=True), lambda size: (weighted(size),)),
    "model": (Model, lambda size: (batch(size),)),
    "DLRM": (lambda: rs.DLRM(rs.EmbeddingBagCollection(POOLED[:1]), 3, [8], [4, 1]), with_numbers),
    "DLRM_DCN": (lambda: DLRM_DCN(rs.EmbeddingBagCollection(POOLED[:1]), 3, [8], [4, 1], 2, 4), with_numbers),
    "DeepFM": (lambda: SimpleDeepFMNN(3, rs.EmbeddingBagCollection(POOLED[:1]), 4, 4), with_numbers),
    "position weights": (
        lambda: FeatureProcessedEmbeddingBagCollection(
            rs.EmbeddingBagCollection(POOLED, is_weighted=True), PositionWeightedModuleCollection({"a": 4})
        ),
        lambda size: (batch(size),),
    ),
}


@pytest.mark.parametrize(*grid(name=list(EXPORTED), gate={"name": {*EXPORTED} - {"pooled", "model"}}))
def test_an_exported_or_traced_model_takes_batches_of_any_size(name: str) -> None:
    build, arguments = EXPORTED[name]
    model = build()
    shapes = tuple(
        [{0: torch.export.Dim.AUTO} for _ in pytree.tree_leaves(argument)]
        if isinstance(argument, KeyedJaggedTensor)
        else {0: torch.export.Dim.AUTO}
        for argument in arguments(3)
    )
    program = torch.export.export(model, arguments(3), dynamic_shapes=shapes).module()
    traced = fx.symbolic_trace(model)
    for size in (3, 5):
        expected = pytree.tree_leaves(model(*(given := arguments(size))))
        torch.testing.assert_close(pytree.tree_leaves(program(*given)), expected)
        torch.testing.assert_close(pytree.tree_leaves(traced(*given)), expected)


def test_torchscript_is_refused_with_its_replacement() -> None:
    for model in (rs.EmbeddingBagCollection(POOLED), Model().sequence, Model()):
        with (
            pytest.warns(DeprecationWarning, match="torch.jit.script"),
            pytest.raises(ValueError, match=r"does not compile Embedding\w*Collection.* call torch.export.export"),
        ):
            torch.jit.script(model)
