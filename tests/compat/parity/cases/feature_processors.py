"""Feature processors: weights of places, tables behind processors, helpers."""

from typing import Any

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.modules import feature_processor, feature_processor_
from torchrec.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
)

from tests.compat.parity.case import case
from tests.compat.parity.cases.modules import given

OLD, NEW = "torchrec.modules.feature_processor", "torchrec.modules.feature_processor_"
TABLES = "torchrec.modules.fp_embedding_modules"


def ids(weights: Any = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["a", "b", "c"], torch.tensor([1, 2, 7, 4, 5, 6]), lengths=torch.tensor([2, 1, 0, 2, 1, 0]), weights=weights
    )


def tables(**fields: Any) -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(name="t", embedding_dim=2, num_embeddings=10, feature_names=["a", "b"])
    return given(EmbeddingBagCollection([config], is_weighted=True, **fields))  # type: ignore[no-any-return]


@case(f"{NEW}.PositionWeightedModule")
def gradients_of_places() -> Any:
    module = feature_processor_.PositionWeightedModule(3)
    module(ids()["a"]).weights().sum().backward()
    return module.position_weight.grad


@case(f"{NEW}.PositionWeightedModuleCollection")
def weights_of_places_of_all_features() -> Any:
    module = given(feature_processor_.PositionWeightedModuleCollection({"a": 3, "b": 4, "c": 2}))
    return {"out": module(ids()), "names": list(module.state_dict())}


@case(f"{NEW}.FeatureProcessor", f"{NEW}.FeatureProcessorsCollection")
def own_processors() -> Any:
    class Half(feature_processor_.FeatureProcessor):
        def forward(self, features: JaggedTensor) -> JaggedTensor:
            weights = torch.full((features.values().numel(),), 0.5)
            return JaggedTensor(features.values(), lengths=features.lengths(), weights=weights)

    class Halves(feature_processor_.FeatureProcessorsCollection):
        def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
            weights = torch.full((features.values().numel(),), 0.5)
            return KeyedJaggedTensor(features.keys(), features.values(), weights, features.lengths())

    one = FeatureProcessedEmbeddingBagCollection(tables(), {"a": Half(), "b": Half()})
    return {"one each": one(ids()), "all": FeatureProcessedEmbeddingBagCollection(tables(), Halves())(ids())}


@case(f"{OLD}.BaseFeatureProcessor", f"{OLD}.BaseGroupedFeatureProcessor")
def bases() -> Any:
    kinds = (feature_processor.PositionWeightedModule({"a": 1}), feature_processor.PositionWeightedProcessor({"a": 1}))
    return [
        isinstance(module, base)
        for module in kinds
        for base in (feature_processor.BaseFeatureProcessor, feature_processor.BaseGroupedFeatureProcessor)
    ]


def processed() -> Any:
    own = {key: given(feature_processor_.PositionWeightedModule(3)) for key in ("a", "b")}
    return FeatureProcessedEmbeddingBagCollection(tables(), own)


@case(f"{TABLES}.FeatureProcessedEmbeddingBagCollection")
def tables_behind_a_collection() -> Any:
    own = given(feature_processor_.PositionWeightedModuleCollection({"a": 3}))
    module = FeatureProcessedEmbeddingBagCollection(tables(), own)
    return {"out": module(ids()), "names": list(module.state_dict())}
