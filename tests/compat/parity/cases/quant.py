"""Quantized collections: from float ones, preparations, pruning, bytes. Rows are multiples of their scale: exact."""

from typing import Any

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType, PoolingType, QuantConfig
from torchrec.modules.mc_modules import LFU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.quant import EmbeddingBagCollection as TopQuant
from torchrec.quant import embedding_modules as quant
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantBag
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantSequence

from tests.compat.parity.case import case

Q = "torchrec.quant.embedding_modules"
CPU = torch.device("cpu")
BATCH = KeyedJaggedTensor(["f0", "f1"], torch.tensor([0, 1, 3, 2]), lengths=torch.tensor([2, 0, 1, 1]))


def rows(first: float) -> torch.Tensor:
    """Rows from 0 to 255 times a power of two, plus an integer: every format with 8 bits stores them exactly."""
    steps = torch.tensor([0.0, 255.0, 17.0, 128.0, 3.0, 64.0, 200.0, 5.0])
    return torch.stack([steps * scale + first for scale in (0.25, 0.5, 1.0, 2.0)])


def bags(pooling: Any = PoolingType.SUM, weighted: bool = False) -> Any:
    tables = [
        EmbeddingBagConfig(
            num_embeddings=4, embedding_dim=8, name=f"t{number}", feature_names=[f"f{number}"], pooling=pooling
        )
        for number in range(2)
    ]
    collection = EmbeddingBagCollection(tables, is_weighted=weighted)
    for number in range(2):
        collection.embedding_bags[f"t{number}"].weight.data.copy_(rows(float(number)))
    return collection


def sequences() -> Any:
    table = EmbeddingConfig(num_embeddings=4, embedding_dim=8, name="t", feature_names=["f0", "f1"])
    collection = EmbeddingCollection([table])
    collection.embeddings["t"].weight.data.copy_(rows(2.0))
    return collection


def requested(module: Any, weight: Any = torch.qint8, output: Any = torch.float32, tables: Any = None) -> Any:
    observer = torch.ao.quantization.PlaceholderObserver
    module.qconfig = QuantConfig(
        activation=observer.with_args(dtype=output),
        weight=observer.with_args(dtype=weight),
        per_table_weight_dtype=tables,
    )
    return module


@case(f"{Q}.EmbeddingBagCollection", "torchrec.quant.EmbeddingBagCollection")
def bags_from_float() -> Any:
    served = QuantBag.from_float(requested(bags()))
    return {
        "pooled": served(BATCH),
        "configs": [(table.name, table.data_type, table.num_embeddings) for table in served.embedding_bag_configs()],
        "weighted": served.is_weighted(),
        "output": served.output_dtype(),
        "device": served.device,
        "name": served._get_name(),
        "buffers": sorted(name for name, _ in served.named_buffers()),
        "one class": TopQuant is QuantBag,
    }


@case(f"{Q}.EmbeddingBagCollection")
def means_weights_and_outputs_in_fp16() -> Any:
    weighted = KeyedJaggedTensor(
        ["f0", "f1"], BATCH.values(), torch.tensor([0.5, 2.0, 1.0, 4.0]), lengths=BATCH.lengths()
    )
    return [
        QuantBag.from_float(requested(bags(PoolingType.MEAN)))(BATCH),
        QuantBag.from_float(requested(bags(weighted=True)))(weighted),
        QuantBag.from_float(requested(bags(), output=torch.float16))(BATCH),
    ]


@case(f"{Q}.EmbeddingBagCollection")
def formats_of_tables() -> Any:
    exact = [QuantBag.from_float(requested(bags(), kind))(BATCH) for kind in (torch.float16, torch.float32)]
    mixed = QuantBag.from_float(requested(bags(), tables={"t1": torch.float16}))
    return [exact, mixed(BATCH), [table.data_type for table in mixed.embedding_bag_configs()]]


@case(f"{Q}.EmbeddingCollection")
def sequences_from_float() -> Any:
    served = QuantSequence.from_float(requested(sequences()))
    return {
        "rows": served(BATCH),
        "dim": served.embedding_dim(),
        "indices": served.need_indices(),
        "names": served.embedding_names_by_table(),
        "configs": [(table.name, table.data_type) for table in served.embedding_configs()],
        "name": served._get_name(),
        "output": served.output_dtype(),
    }


@case(f"{Q}.EmbeddingBagCollection", f"{Q}.EmbeddingCollection")
def collections_from_bytes() -> Any:
    found: dict[str, Any] = {}
    quant.quantize_state_dict(bags(), found, dict.fromkeys(("t0", "t1"), DataType.INT8))
    tables = [
        EmbeddingBagConfig(
            num_embeddings=4, embedding_dim=8, name=name, feature_names=[feature], data_type=DataType.INT8
        )
        for name, feature in (("t0", "f0"), ("t1", "f1"))
    ]
    sequence: dict[str, Any] = {}
    quant.quantize_state_dict(sequences(), sequence, {"t": DataType.INT8})
    table = EmbeddingConfig(
        num_embeddings=4, embedding_dim=8, name="t", feature_names=["f0", "f1"], data_type=DataType.INT8
    )
    return [
        QuantBag(tables, False, CPU, table_name_to_quantized_weights=found)(BATCH),
        QuantSequence([table], CPU, True, table_name_to_quantized_weights=sequence)(BATCH),
        QuantBag(tables, False, CPU)(BATCH) is not None,
    ]


@case(
    f"{Q}.quant_prep_enable_quant_state_dict_split_scale_bias",
    f"{Q}.quant_prep_enable_register_tbes",
    f"{Q}.quant_prep_customize_row_alignment",
    f"{Q}.quant_prep_enable_cache_features_order",
    f"{Q}.for_each_module_of_type_do",
)
def preparations_are_attributes() -> Any:
    model = torch.nn.Sequential(requested(bags()), torch.nn.Linear(1, 1), requested(sequences()))
    kinds = [EmbeddingBagCollection, EmbeddingCollection]
    quant.quant_prep_enable_quant_state_dict_split_scale_bias(model)
    quant.quant_prep_enable_register_tbes(model, kinds)
    quant.quant_prep_customize_row_alignment(model, kinds[:1], 4)
    quant.quant_prep_enable_cache_features_order(model, kinds)
    seen: list[str] = []
    quant.for_each_module_of_type_do(
        model, [EmbeddingBagCollection, torch.nn.Linear], lambda part: seen.append(type(part).__name__)
    )
    marks = [{name: value for name, value in vars(part).items() if name.startswith("__")} for part in (model, *model)]
    return [marks, seen, QuantBag.from_float(model[0])(BATCH), QuantSequence.from_float(model[2])(BATCH)]


def managed(kind: Any, collection: Any, tables: Any, remapped: bool) -> Any:
    modules = {
        table.name: MCHManagedCollisionModule(
            zch_size=4, device=CPU, eviction_policy=LFU_EvictionPolicy(), eviction_interval=1
        )
        for table in tables
    }
    module = requested(kind(collection, ManagedCollisionCollection(modules, tables), return_remapped_features=remapped))
    raw = KeyedJaggedTensor(["f0", "f1"], torch.tensor([70, 90, 70, 80]), lengths=BATCH.lengths())
    with torch.no_grad():
        module(raw)
    return module, raw
