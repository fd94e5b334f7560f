"""Feature processors: weights of places, tables behind processors, helpers."""

from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.modules import feature_processor, feature_processor_
from torchrec.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
    FeatureProcessorDictWrapper,
    apply_feature_processors_to_kjt,
)

from tests.compat.parity.case import case, raised

OLD, NEW = "torchrec.modules.feature_processor", "torchrec.modules.feature_processor_"
TABLES = "torchrec.modules.fp_embedding_modules"


def ids(weights: Any = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["a", "b", "c"], torch.tensor([1, 2, 7, 4, 5, 6]), lengths=torch.tensor([2, 1, 0, 2, 1, 0]), weights=weights
    )


def filled(module: Any) -> Any:
    """The module with weights 0.1, 0.2, ..."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_((torch.arange(weight.numel()) + 1.0).reshape(weight.shape) / 10)
    return module


def tables(**fields: Any) -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(name="t", embedding_dim=2, num_embeddings=10, feature_names=["a", "b"])
    return filled(EmbeddingBagCollection([config], is_weighted=True, **fields))  # type: ignore[no-any-return]


@case(f"{NEW}.PositionWeightedModule")
def weights_of_places() -> Any:
    module = filled(feature_processor_.PositionWeightedModule(3))
    return {"out": module(ids()["a"]), "names": list(module.state_dict())}


@case(f"{NEW}.PositionWeightedModule")
def new_weights_are_ones() -> Any:
    module = feature_processor_.PositionWeightedModule(2, device=torch.device("cpu"))
    first = dict(module.state_dict())
    filled(module).reset_parameters()
    return {"first": first, "again": dict(module.state_dict())}


@case(f"{NEW}.PositionWeightedModule")
def given_weights_are_replaced() -> Any:
    return filled(feature_processor_.PositionWeightedModule(3))(ids(torch.ones(6) * 2)["a"])


@case(f"{NEW}.PositionWeightedModule")
def gradients_of_places() -> Any:
    module = feature_processor_.PositionWeightedModule(3)
    module(ids()["a"]).weights().sum().backward()
    return module.position_weight.grad


@case(f"{NEW}.PositionWeightedModuleCollection")
def weights_of_places_of_all_features() -> Any:
    module = filled(feature_processor_.PositionWeightedModuleCollection({"a": 3, "b": 4, "c": 2}))
    return {"out": module(ids()), "names": list(module.state_dict())}


@case(f"{NEW}.PositionWeightedModuleCollection")
def other_features_have_weight_one() -> Any:
    return filled(feature_processor_.PositionWeightedModuleCollection({"a": 3}))(ids())


@case(f"{NEW}.PositionWeightedModuleCollection")
def a_collection_loads() -> Any:
    module = feature_processor_.PositionWeightedModuleCollection({"a": 3})
    module.load_state_dict({"position_weights.a": torch.tensor([1.0, 2.0, 3.0])})
    return module(ids())


@case(
    f"{NEW}.PositionWeightedModuleCollection",
    differs="a feature that has a processor and is missing from the batch is an error here",
)
def a_feature_that_is_missing() -> Any:
    return raised(lambda: feature_processor_.PositionWeightedModuleCollection({"z": 3})(ids()))


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


@case(f"{NEW}.get_weights_list")
def weights_from_places() -> Any:
    places = torch.tensor([0, 1, 0, 0, 1, 0])
    learned = {"a": nn.Parameter(torch.tensor([1.0, 2.0, 3.0])), "c": nn.Parameter(torch.tensor([7.0]))}
    return [feature_processor_.get_weights_list(places, ids(), own) for own in (learned, {})]


@case(f"{NEW}.get_stride_per_key_per_rank")
def batch_sizes_of_keys() -> Any:
    variable = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([1, 0, 1]), stride_per_key_per_rank=[[2], [1]]
    )
    return [feature_processor_.get_stride_per_key_per_rank(kjt) for kjt in (ids(), variable)]


@case(f"{OLD}.PositionWeightedModule")
def weights_of_features_by_name() -> Any:
    module = filled(feature_processor.PositionWeightedModule({"a": 3, "b": 4}))
    missing = raised(lambda: feature_processor.PositionWeightedModule({"z": 3})(ids().to_dict()))
    return {"out": module(ids().to_dict()), "names": list(module.state_dict()), "missing": missing}


@case(f"{OLD}.PositionWeightedModule")
def weights_by_name_are_reset() -> Any:
    module = filled(feature_processor.PositionWeightedModule({"a": 2}))
    module.reset_parameters()
    return dict(module.state_dict())


@case(f"{OLD}.PositionWeightedProcessor")
def only_features_with_weights_remain() -> Any:
    return filled(feature_processor.PositionWeightedProcessor({"a": 3, "b": 4}))(ids())


@case(f"{OLD}.PositionWeightedProcessor")
def all_features_remain() -> Any:
    return filled(feature_processor.PositionWeightedProcessor({"a": 3, "b": 4, "c": 2}))(ids())


@case(f"{OLD}.PositionWeightedProcessor")
def a_batch_without_its_features() -> Any:
    return feature_processor.PositionWeightedProcessor({"z": 3})(ids())


@case(f"{OLD}.PositionWeightedProcessor")
def names_of_a_processor() -> Any:
    module = feature_processor.PositionWeightedProcessor({"a": 3, "b": 1})
    return {**module.state_dict(), "buffers": [name for name, _ in module.named_buffers()]}


@case(f"{OLD}.BaseFeatureProcessor", f"{OLD}.BaseGroupedFeatureProcessor")
def bases() -> Any:
    kinds = (feature_processor.PositionWeightedModule({"a": 1}), feature_processor.PositionWeightedProcessor({"a": 1}))
    return [
        isinstance(module, base)
        for module in kinds
        for base in (feature_processor.BaseFeatureProcessor, feature_processor.BaseGroupedFeatureProcessor)
    ]


@case(f"{OLD}.offsets_to_range_traceble")
def places_from_offsets() -> Any:
    return feature_processor.offsets_to_range_traceble(torch.tensor([0, 2, 2, 5]), torch.tensor([9, 8, 7, 6, 5]))


@case(f"{OLD}.position_weighted_module_update_features")
def features_updated() -> Any:
    new = JaggedTensor(torch.tensor([1, 2, 7]), lengths=torch.tensor([2, 1]), weights=torch.tensor([0.1, 0.2, 0.3]))
    return feature_processor.position_weighted_module_update_features(ids().to_dict(), {"a": new})


@case(f"{TABLES}.apply_feature_processors_to_kjt")
def processors_of_some_features() -> Any:
    some = {"a": filled(feature_processor_.PositionWeightedModule(3))}
    weighted = ids(torch.ones(6) * 2)
    return [apply_feature_processors_to_kjt(kjt, own) for kjt, own in ((ids(), some), (ids(), {}), (weighted, some))]


@case(f"{TABLES}.FeatureProcessorDictWrapper")
def processors_in_a_dictionary() -> Any:
    own = nn.ModuleDict({"a": filled(feature_processor_.PositionWeightedModule(3))})
    module = FeatureProcessorDictWrapper(own)
    return {"out": module(ids()), "names": list(module.state_dict())}


def processed() -> Any:
    own = {key: filled(feature_processor_.PositionWeightedModule(3)) for key in ("a", "b")}
    return FeatureProcessedEmbeddingBagCollection(tables(), own)


@case(f"{TABLES}.FeatureProcessedEmbeddingBagCollection")
def tables_behind_processors() -> Any:
    module = processed()
    out = module(ids())
    out.values().sum().backward()
    return {"out": out, "names": list(module.state_dict()), "grads": [p.grad for p in module.parameters()]}


@case(f"{TABLES}.FeatureProcessedEmbeddingBagCollection")
def tables_behind_a_collection() -> Any:
    own = filled(feature_processor_.PositionWeightedModuleCollection({"a": 3}))
    module = FeatureProcessedEmbeddingBagCollection(tables(), own)
    return {"out": module(ids()), "names": list(module.state_dict())}


@case(f"{TABLES}.FeatureProcessedEmbeddingBagCollection")
def processors_and_tables_apart() -> Any:
    module = processed()
    processors, own = module.split()
    return {"out": own(processors(ids())), "kinds": [type(processors), type(own)], "weighted": module.is_weighted()}
