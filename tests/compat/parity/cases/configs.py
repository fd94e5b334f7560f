"""Table configs: fields, defaults, initial ranges, number formats and poolings."""

import dataclasses
import pickle
from typing import Any

import torch
import torchrec
from torchrec.modules import embedding_configs as configs
from torchrec.modules.embedding_configs import (
    DATA_TYPE_NUM_BITS,
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    EmbeddingTableConfig,
    PoolingType,
    ShardingType,
    data_type_to_dtype,
    dtype_to_data_type,
    pooling_type_to_pooling_mode,
    pooling_type_to_str,
)

from tests.compat.parity.case import case, raised

CONFIGS = "torchrec.modules.embedding_configs"
FIELDS = [
    "num_embeddings",
    "embedding_dim",
    "name",
    "data_type",
    "feature_names",
    "weight_init_max",
    "weight_init_min",
    "num_embeddings_post_pruning",
    "need_pos",
    "input_dim",
    "total_num_buckets",
    "use_virtual_table",
    "virtual_table_eviction_policy",
    "enable_embedding_update",
    "stash_weights",
]


def fields(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in FIELDS}


@case(f"{CONFIGS}.EmbeddingBagConfig")
def defaults_of_bags() -> Any:
    config = EmbeddingBagConfig(10, 4)
    return {**fields(config), "pooling": config.pooling}


@case(f"{CONFIGS}.EmbeddingConfig")
def defaults_of_rows() -> Any:
    return fields(EmbeddingConfig(num_embeddings=10, embedding_dim=4))


@case(f"{CONFIGS}.EmbeddingBagConfig")
def fields_in_order() -> Any:
    config = EmbeddingBagConfig(10, 4, "t", DataType.FP16, ["f", "g"], 1.0, -2.0)
    return {**fields(config), "features": config.num_features()}


@case(f"{CONFIGS}.EmbeddingBagConfig")
def fields_that_no_collection_reads() -> Any:
    config = EmbeddingBagConfig(
        10, 4, "t", feature_names=["f"], need_pos=True, input_dim=7, total_num_buckets=5, num_embeddings_post_pruning=10
    )
    module = torchrec.EmbeddingBagCollection([config])
    return {**fields(config), "shape": module.embedding_bags["t"].weight.shape}


@case(f"{CONFIGS}.BaseEmbeddingConfig")
def initial_ranges() -> Any:
    made = [BaseEmbeddingConfig(25, 4, **ends) for ends in ({}, {"weight_init_max": 3.0}, {"weight_init_min": -1.0})]
    return [[config.get_weight_init_min(), config.get_weight_init_max()] for config in made]


@case(f"{CONFIGS}.EmbeddingTableConfig")
def tables_of_kernels() -> Any:
    plain = EmbeddingTableConfig(num_embeddings=3, embedding_dim=2)
    full = EmbeddingTableConfig(
        num_embeddings=3,
        embedding_dim=2,
        pooling=PoolingType.MEAN,
        is_weighted=True,
        has_feature_processor=True,
        embedding_names=["a"],
    )
    names = ("pooling", "is_weighted", "has_feature_processor", "embedding_names")
    return [[getattr(config, name) for name in names] for config in (plain, full)]


@case(f"{CONFIGS}.EmbeddingBagConfig", f"{CONFIGS}.EmbeddingConfig")
def kinds_of_configs() -> Any:
    made = (EmbeddingBagConfig(3, 2), EmbeddingConfig(3, 2), EmbeddingTableConfig(3, 2))
    kinds = (BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig, EmbeddingTableConfig)
    return [[isinstance(config, kind) for kind in kinds] for config in made]


@case(f"{CONFIGS}.EmbeddingBagConfig")
def one_class_in_all_modules() -> Any:
    return [
        torchrec.EmbeddingBagConfig is EmbeddingBagConfig,
        torchrec.modules.embedding_modules.EmbeddingBagConfig is EmbeddingBagConfig,
        torchrec.EmbeddingConfig is EmbeddingConfig,
    ]


@case(f"{CONFIGS}.EmbeddingBagConfig")
def configs_replaced_and_compared() -> Any:
    config = EmbeddingBagConfig(10, 4, "t", need_pos=True)
    other = dataclasses.replace(config, name="u")
    names = {field.name for field in dataclasses.fields(config)}
    return {"name": other.name, "need_pos": other.need_pos, "equal": config == other, "fields": set(FIELDS) <= names}


@case(f"{CONFIGS}.EmbeddingBagConfig")
def configs_pickled() -> Any:
    config = EmbeddingBagConfig(10, 4, "t", feature_names=["f"], input_dim=3)
    return fields(pickle.loads(pickle.dumps(config)))


@case(f"{CONFIGS}.EmbeddingBagConfig")
def init_fn_draws_a_table() -> Any:
    config = EmbeddingBagConfig(3, 2, "t", feature_names=["f"], init_fn=torch.nn.init.ones_)
    return torchrec.EmbeddingBagCollection([config]).embedding_bags["t"].weight


@case(
    f"{CONFIGS}.EmbeddingBagConfig",
    differs="init_fn that is left out stays None here; the collection draws the same weights",
)
def init_fn_left_out() -> Any:
    return EmbeddingBagConfig(3, 2, "t").init_fn is None


@case(
    f"{CONFIGS}.EmbeddingBagConfig", differs="virtual tables need CUDA kernels: the field is refused with this reason"
)
def virtual_tables() -> Any:
    return raised(lambda: EmbeddingBagConfig(3, 2, "t", use_virtual_table=True))


@case(
    f"{CONFIGS}.EmbeddingBagConfig",
    differs="a table is served with all its rows: another number_post_pruning is refused",
)
def pruned_tables() -> Any:
    return raised(lambda: EmbeddingBagConfig(3, 2, "t", num_embeddings_post_pruning=2))


@case(f"{CONFIGS}.data_type_to_dtype")
def dtypes_of_formats() -> Any:
    formats = (DataType.FP32, DataType.FP16, DataType.BF16, DataType.INT8, DataType.INT4, DataType.INT2)
    return [data_type_to_dtype(data_type) for data_type in formats]


@case(f"{CONFIGS}.dtype_to_data_type")
def formats_of_dtypes() -> Any:
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.qint8, torch.quint8, torch.quint4x2)
    return [dtype_to_data_type(dtype).name for dtype in (*dtypes, torch.quint2x4)]


@case(f"{CONFIGS}.DATA_TYPE_NUM_BITS")
def bits() -> Any:
    formats = (DataType.FP32, DataType.FP16, DataType.BF16, DataType.INT8, DataType.INT4, DataType.INT2)
    return [DATA_TYPE_NUM_BITS[data_type] for data_type in formats]


@case(f"{CONFIGS}.PoolingType", f"{CONFIGS}.pooling_type_to_str")
def poolings() -> Any:
    names = [pooling_type_to_str(pooling) for pooling in (PoolingType.SUM, PoolingType.MEAN)]
    return {"values": [pooling.value for pooling in PoolingType], "names": names} | {
        "none": raised(lambda: pooling_type_to_str(PoolingType.NONE))
    }


@case(f"{CONFIGS}.pooling_type_to_pooling_mode", f"{CONFIGS}.ShardingType")
def pooling_modes() -> Any:
    kinds = ("DATA_PARALLEL", "TABLE_WISE", "COLUMN_WISE", "ROW_WISE", "TABLE_ROW_WISE", "TABLE_COLUMN_WISE")
    return [
        [int(pooling_type_to_pooling_mode(pooling))]
        + [int(pooling_type_to_pooling_mode(pooling, configs.ShardingType[kind])) for kind in kinds]
        for pooling in PoolingType
    ] + [ShardingType[kind].value for kind in kinds]  # type: ignore[list-item]


@case(f"{CONFIGS}.QuantConfig")
def quant_config() -> Any:
    made = configs.QuantConfig(activation="a", weight="w", per_table_weight_dtype={"t": torch.qint8})
    return [made.activation, made.weight, made.per_table_weight_dtype]
