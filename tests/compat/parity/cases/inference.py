"""From a trained model to one for serving: quantized, pruned, with dicts of tensors; state dicts."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import quant_embeddingbag
from torchrec.distributed.types import ParameterSharding
from torchrec.inference.dlrm_predict import DLRMModelConfig, DLRMPredictModule
from torchrec.inference.modules import (
    BatchingMetadata,
    PredictFactory,
    PredictModule,
    QualNameMetadata,
    quantize_embeddings,
    quantize_inference_model,
    set_pruning_data,
    trim_torch_package_prefix_from_typename,
)
from torchrec.inference.state_dict_transform import (
    state_dict_all_gather_keys,
    state_dict_gather,
    state_dict_to_device,
)
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantBag
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantSequence

from tests.compat.parity.case import case, on_ranks, raised
from tests.compat.parity.cases.quant import BATCH, bags, feature_processed, sequences

M = "torchrec.inference.modules"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pooled, self.rows, self.dense = bags(), sequences(), torch.nn.Linear(2, 2)


@case(f"{M}.quantize_inference_model")
def a_quantized_model() -> Any:
    model = Model()
    served = quantize_inference_model(model)
    return [
        served is model,
        isinstance(served.pooled, QuantBag),
        isinstance(served.rows, QuantSequence),
        type(served.dense),
        served.pooled(BATCH),
        served.rows(BATCH),
    ]


@case(f"{M}.quantize_inference_model")
def formats_of_a_quantized_model() -> Any:
    served = quantize_inference_model(Model(), per_table_weight_dtype={"t0": torch.float16}, output_dtype=torch.float16)
    only = quantize_inference_model(
        Model(), quantization_mapping={"torchrec.modules.embedding_modules.EmbeddingBagCollection": QuantBag}
    )
    return [
        [(table.name, table.data_type) for table in served.pooled.embedding_bag_configs()],
        served.pooled(BATCH),
        quantize_inference_model(Model(), quantization_dtype=torch.float16).pooled(BATCH),
        isinstance(only.pooled, QuantBag),
        isinstance(only.rows, EmbeddingCollection),
    ]


@case(f"{M}.quantize_inference_model")
def a_quantized_model_with_feature_processors() -> Any:
    model = torch.nn.Sequential(torch.nn.Sequential(feature_processed()))
    served = quantize_inference_model(model, quantization_dtype=torch.float16)
    return served[0][0](BATCH)


@case(f"{M}.quantize_embeddings")
def a_copy_or_the_model_itself() -> Any:
    model = torch.nn.Sequential(bags())
    copied = quantize_embeddings(model, torch.int8, inplace=False)
    kept = isinstance(model[0], EmbeddingBagCollection)
    changed = quantize_embeddings(model, torch.float16, inplace=True)
    return [copied is model, kept, copied[0](BATCH), changed is model, changed[0](BATCH)]


@case(f"{M}.set_pruning_data")
def pruned_tables() -> Any:
    model = set_pruning_data(torch.nn.Sequential(bags()), {"t0": 2})
    served = quantize_inference_model(model)
    return [served is model, served.state_dict()["0.embedding_bags.t0.weight"].shape[0], served[0](BATCH)]


@case(f"{M}.trim_torch_package_prefix_from_typename")
def names_of_packaged_types() -> Any:
    return [trim_torch_package_prefix_from_typename(name) for name in ("<torch_package_0>.a.b", "a.b")]


class Doubled(PredictModule):
    def predict_forward(self, batch: Any) -> Any:
        return {"out": self.predict_module(batch["x"]) * 2}


@case(f"{M}.PredictModule")
def a_predict_module() -> Any:
    linear = torch.nn.Linear(2, 1)
    linear.weight.data.fill_(3.0)
    linear.bias.data.fill_(1.0)
    module = Doubled(linear, "cpu")
    output = module({"x": torch.ones(2, 2)})["out"]
    return [
        output,
        output.is_inference(),
        sorted(module.state_dict()),
        module.training,
        module.predict_module is linear,
    ]


class Factory(PredictFactory):
    def create_predict_module(self) -> Any:
        return Doubled(torch.nn.Linear(2, 1))

    def batching_metadata(self) -> Any:
        return {"x": BatchingMetadata(type="dense", device="cpu", pinned=["values"])}

    def result_metadata(self) -> str:
        return "dict_of_tensor"

    def run_weights_independent_tranformations(self, predict_module: Any) -> Any:
        return predict_module

    def run_weights_dependent_transformations(self, predict_module: Any) -> Any:
        return predict_module


@case(f"{M}.PredictFactory", f"{M}.BatchingMetadata", f"{M}.QualNameMetadata")
def a_predict_factory() -> Any:
    factory = Factory()
    return [
        json.loads(factory.batching_metadata_json()),
        factory.qualname_metadata(),
        json.loads(factory.qualname_metadata_json()),
        factory.model_inputs_data(),
        factory.result_metadata(),
        QualNameMetadata(need_preproc=True).need_preproc,
        raised(lambda: PredictFactory()),
    ]


@case("torchrec.inference.dlrm_predict.DLRMPredictModule", "torchrec.inference.dlrm_predict.DLRMModelConfig")
def a_dlrm_that_predicts() -> Any:
    module = DLRMPredictModule(bags(), 2, [4, 8], [4, 1], ["f0", "f1"], torch.device("cpu"))
    for parameter in module.predict_module.parameters():
        parameter.data.fill_(0.01)
    batch = {
        "float_features": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "id_list_features.lengths": BATCH.lengths().reshape(2, 2),
        "id_list_features.values": BATCH.values(),
    }
    config = DLRMModelConfig(
        [4, 8], 2, 8, ["f0", "f1"], [4, 4], 4, [4, 1], Batch(torch.zeros(1, 2), BATCH, torch.zeros(1))
    )
    return [module(batch), config.embedding_dim, raised(lambda: module({}))]


S = "torchrec.inference.state_dict_transform"


def gathered(rank: int) -> Any:
    group = dist.group.WORLD
    target = {"a": torch.zeros(2)}
    state_dict_gather({"a": torch.tensor([1.0, 2.0]) + rank, "b": torch.ones(1)}, target)
    names = state_dict_all_gather_keys({"a": torch.ones(1), f"only{rank}": torch.ones(1)}, group)
    moved = state_dict_to_device({"a": torch.ones(1)}, group, torch.device("cpu"))
    return [target, sorted(names), moved, raised(lambda: state_dict_gather({}, target))]


@case(f"{S}.state_dict_gather", f"{S}.state_dict_all_gather_keys", f"{S}.state_dict_to_device")
def state_dicts_of_two_ranks() -> Any:
    return on_ranks(2, gathered)


D = "torchrec.distributed.quant_embeddingbag"


@case(
    f"{D}.flatten_feature_lengths",
    f"{D}.FUSED_PARAM_IS_SSD_TABLE",
    f"{D}.FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS",
    f"{D}.FUSED_PARAM_REGISTER_TBE_BOOL",
    f"{D}.MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS",
)
def lengths_of_one_dimension() -> Any:
    square = KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([[1, 0], [1, 1]]))
    return [
        quant_embeddingbag.flatten_feature_lengths(square),
        quant_embeddingbag.flatten_feature_lengths(BATCH) is BATCH,
        quant_embeddingbag.FUSED_PARAM_IS_SSD_TABLE,
        quant_embeddingbag.FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
        quant_embeddingbag.FUSED_PARAM_REGISTER_TBE_BOOL,
        quant_embeddingbag.MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
    ]


@case(f"{D}.get_device_from_parameter_sharding")
def kinds_of_devices() -> Any:
    found = []
    for devices in (("cpu", "cpu"), ("cuda:0", "cuda:1"), ("cuda:0", "cpu")):
        shards = [
            ShardMetadata(shard_offsets=[4 * rank, 0], shard_sizes=[4, 4], placement=f"rank:{rank}/{device}")
            for rank, device in enumerate(devices)
        ]
        sharding = ParameterSharding("row_wise", "fused", [0, 1], EnumerableShardingSpec(shards))
        found.append(quant_embeddingbag.get_device_from_parameter_sharding(sharding))
    return found


@case(f"{D}.QuantEmbeddingBagCollectionSharder")
def a_sharder_of_quantized_bags() -> Any:
    sharder = quant_embeddingbag.QuantEmbeddingBagCollectionSharder()
    other = quant_embeddingbag.QuantEmbeddingBagCollectionSharder(fused_params={"a": 1})
    return [sharder.module_type is QuantBag, sharder.sharding_types("cpu"), sharder.fused_params, other.fused_params]
