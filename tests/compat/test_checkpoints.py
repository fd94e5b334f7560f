"""State dicts of this library's models load into TorchRec's models and the other way round."""

import pytest
import torch
from torch import nn

from recshard_lab.compat import state_dict_from_torchrec, state_dict_to_torchrec, torchrec_parameter_names
from recshard_lab.compat.models import dlrm as theirs
from recshard_lab.compat.modules import mlp as their_layers
from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.models import DLRM, DLRM_DCN, MLP, DLRMTrain, Perceptron, SimpleDeepFMNN
from recshard_lab.sparse import KeyedJaggedTensor
from tests.compat.parity.compare import recorded


def tables() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(5, 4, "t1", feature_names=["f1", "f3"]),
            EmbeddingBagConfig(6, 4, "t2", feature_names=["f2"]),
        ]
    )


def ids() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f1", "f3", "f2"], torch.tensor([1, 2, 3, 0]), lengths=torch.tensor([1, 0, 1, 1, 0, 1]))


MODELS = {
    "dlrm_first_weights": lambda: DLRM(tables(), 3, [5, 4], [6, 1]),
    "dlrm_train_first_weights": lambda: DLRMTrain(DLRM(tables(), 3, [5, 4], [6, 1])),
    "dcn_first_weights": lambda: DLRM_DCN(tables(), 3, [5, 4], [6, 1], 2, 3),
    "deepfm_first_weights": lambda: SimpleDeepFMNN(3, tables(), 5, 6),
}


@pytest.mark.parametrize("model", MODELS)
def test_names_are_those_that_torchrec_printed(model: str) -> None:
    names = torchrec_parameter_names(MODELS[model]())
    assert list(names.values()) == recorded("models")[model]["names"]


@pytest.mark.parametrize(
    ("ours", "served"),
    [
        (MODELS["dlrm_first_weights"], lambda: theirs.DLRM(tables(), 3, [5, 4], [6, 1])),
        (MODELS["dcn_first_weights"], lambda: theirs.DLRM_DCN(tables(), 3, [5, 4], [6, 1], 2, 3)),
    ],
)
def test_weights_go_there_and_back(ours: object, served: object) -> None:
    one, two = ours(), served()  # type: ignore[operator]
    dense = torch.rand(2, 3)
    two.load_state_dict(state_dict_to_torchrec(one))
    assert torch.equal(one(dense, ids()), two(dense, ids()))
    nn.init.ones_(two.over_arch.model[1].weight)
    one.load_state_dict(state_dict_from_torchrec(one, two.state_dict()))
    assert torch.equal(one(dense, ids()), two(dense, ids()))


@pytest.mark.parametrize("activation", ["relu", "swish_layernorm", nn.PReLU])
def test_activations_with_weights_are_converted(activation: object) -> None:
    model = MLP(3, [4, 2], activation=activation)  # type: ignore[arg-type]
    served = their_layers.MLP(3, [4, 2], activation=activation)  # type: ignore[arg-type]
    assert sorted(state_dict_to_torchrec(model)) == sorted(served.state_dict())
    model.load_state_dict(state_dict_from_torchrec(model, served.state_dict()))
    assert torch.equal(model(torch.ones(1, 3)), served(torch.ones(1, 3)))


def test_other_modules_and_names_do_not_change() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": Perceptron(2, 1)})
    found = state_dict_to_torchrec(model, {**model.state_dict(), "more": torch.ones(1)})
    assert list(found) == ["a.weight", "a.bias", "b._linear.weight", "b._linear.bias", "more"]
    assert list(state_dict_from_torchrec(model, found)) == [*model.state_dict(), "more"]
