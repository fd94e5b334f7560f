"""``torchrec.inference.modules``: a model for serving, from a trained one."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab import embedding, models
from recshard_lab.compat.quant import modules as quant
from recshard_lab.compat.served import target_of
from recshard_lab.planner import EmbeddingShardingPlanner
from recshard_lab.serving import shard_for_inference
from recshard_lab.sharding import ParameterConstraints, ShardingPlan, Topology

DEFAULT_QUANTIZATION: dict[type[nn.Module], Any] = {
    embedding.EmbeddingBagCollection: quant.EmbeddingBagCollection,
    embedding.EmbeddingCollection: quant.EmbeddingCollection,
    models.FeatureProcessedEmbeddingBagCollection: quant.FeatureProcessedEmbeddingBagCollection,
    embedding.ManagedCollisionEmbeddingBagCollection: quant.QuantManagedCollisionEmbeddingBagCollection,
    embedding.ManagedCollisionEmbeddingCollection: quant.QuantManagedCollisionEmbeddingCollection,
}


def trim_torch_package_prefix_from_typename(typename: str) -> str:
    """The name of a type without the prefix of ``torch.package``.

    >>> trim_torch_package_prefix_from_typename("<torch_package_0>.nets.Net")
    'nets.Net'
    """
    return typename.partition(".")[2] if typename.startswith("<torch_package_") else typename


@dataclass
class BatchingMetadata:
    """How an input is batched.

    Args:
        type: "dense" or "sparse", for example.
        device: where the input is needed.
        pinned: the parts that are page-locked.
    """

    type: str
    device: str
    pinned: list[str]


@dataclass
class QualNameMetadata:
    """Whether a method of a model needs its inputs preprocessed."""

    need_preproc: bool


class PredictFactory(ABC):
    """Makes a model for serving; classes of yours define how."""

    @abstractmethod
    def create_predict_module(self) -> nn.Module:
        """The model with its weights."""

    @abstractmethod
    def batching_metadata(self) -> dict[str, BatchingMetadata]:
        """Input -> how it is batched."""

    def batching_metadata_json(self) -> str:
        """`batching_metadata` as JSON."""
        return json.dumps({name: asdict(data) for name, data in self.batching_metadata().items()})

    @abstractmethod
    def result_metadata(self) -> str:
        """The kind of the result."""

    @abstractmethod
    def run_weights_independent_tranformations(self, predict_module: nn.Module) -> nn.Module:
        """Transforms the model before its weights are loaded."""

    @abstractmethod
    def run_weights_dependent_transformations(self, predict_module: nn.Module) -> nn.Module:
        """Transforms the model after its weights were loaded."""

    def qualname_metadata(self) -> dict[str, QualNameMetadata]:
        """Method -> what it needs. Default: nothing."""
        return {}

    def qualname_metadata_json(self) -> str:
        """`qualname_metadata` as JSON."""
        return json.dumps({name: asdict(data) for name, data in self.qualname_metadata().items()})

    def model_inputs_data(self) -> dict[str, Any]:
        """Data from which inputs are generated. Default: none."""
        return {}


class PredictModule(nn.Module):
    """A model whose input and output are dicts of tensors. Classes of yours define ``predict_forward``.

    Args:
        module: the model.
        device: the CUDA device of a forward. Default: the current one.
    """

    def __init__(self, module: nn.Module, device: str | None = None) -> None:
        super().__init__()
        self._module = module
        self._device = None if device is None else torch.device(device)

    @property
    def predict_module(self) -> nn.Module:
        """The model."""
        return self._module

    @abstractmethod
    def predict_forward(self, batch: dict[str, Tensor]) -> Any:
        """The output for a batch."""

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """`predict_forward` without gradients."""
        with torch.inference_mode():
            if self._device is not None and self._device.type == "cuda":
                with torch.cuda.device(self._device):
                    return self.predict_forward(batch)
            return self.predict_forward(batch)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state dict of the model, without a prefix for this wrapper."""
        found: dict[str, Any] = self._module.state_dict(*args, **kwargs)
        return found


def _requested(dtype: torch.dtype, output_dtype: torch.dtype, per_table: Mapping[str, torch.dtype] | None) -> Any:
    """The attribute ``qconfig`` that asks for these types."""
    return embedding.QuantConfig(
        activation=partial(_Observed, output_dtype),
        weight=partial(_Observed, dtype),
        per_table_weight_dtype=dict(per_table) if per_table else None,
    )


@dataclass
class _Observed:
    dtype: torch.dtype


def _class_of(path: str) -> Any:
    """The class of a full name; names of TorchRec are this library's classes."""
    module, _, name = path.rpartition(".")
    target = target_of(module, name)
    if target is not None:
        module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def _swapped(model: nn.Module, mapping: Mapping[Any, Any], config: Any) -> nn.Module:
    """Replaces the modules of the mapping's types in place; returns the root, or its replacement."""
    kind = next((kind for kind in mapping if type(model) is kind), None)
    if kind is not None:
        model.qconfig = config
        quantized: nn.Module = mapping[kind].from_float(model)
        return quantized
    for name, child in model.named_children():
        replaced = _swapped(child, mapping, config)
        if replaced is not child:
            setattr(model, name, replaced)
    return model


def quantize_embeddings(
    module: nn.Module,
    dtype: torch.dtype,
    inplace: bool,
    additional_qconfig_spec_keys: Sequence[type[nn.Module]] | None = None,
    additional_mapping: Mapping[type[nn.Module], type[nn.Module]] | None = None,
    output_dtype: torch.dtype = torch.float32,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
) -> nn.Module:
    """Replaces the collections of a model by quantized ones.

    Args:
        module: the model.
        dtype: the number format of all tables.
        inplace: whether to change the model instead of a copy.
        additional_qconfig_spec_keys: further types that are replaced; each needs an entry in `additional_mapping`.
        additional_mapping: float type -> a type with ``from_float``.
        output_dtype: of looked up rows.
        per_table_weight_dtype: table -> its number format, where it differs.

    Raises:
        ValueError: a further type without an entry.
    """
    missing = [kind.__name__ for kind in additional_qconfig_spec_keys or () if kind not in (additional_mapping or {})]
    if missing:
        raise ValueError(f"type {missing[0]} has no quantized form. Fix: add it to additional_mapping")
    mapping = {**DEFAULT_QUANTIZATION, **(additional_mapping or {})}
    target = module if inplace else deepcopy(module)
    return _swapped(target, mapping, _requested(dtype, output_dtype, per_table_weight_dtype))


def quantize_inference_model(
    model: nn.Module,
    quantization_mapping: Mapping[str, Any] | None = None,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
    fp_weight_dtype: torch.dtype = torch.int8,
    quantization_dtype: torch.dtype = torch.int8,
    output_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Replaces the collections of a model by quantized ones, in place.

    Args:
        model: the model.
        quantization_mapping: full name of a float type -> its quantized type. Default: all collections.
        per_table_weight_dtype: table -> its number format, where it differs.
        fp_weight_dtype: the number format of the tables after feature processors.
        quantization_dtype: the number format of all other tables.
        output_dtype: of looked up rows.

    >>> from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig
    >>> model = nn.Sequential(EmbeddingBagCollection([EmbeddingBagConfig(4, 4, "t", feature_names=["f"])]))
    >>> quantize_inference_model(model)[0].embedding_bags.t.weight.dtype
    torch.uint8
    """
    mapping = DEFAULT_QUANTIZATION
    if quantization_mapping is not None:
        mapping = {_class_of(path): kind for path, kind in quantization_mapping.items()}
    processed = {kind: to for kind, to in mapping.items() if kind is models.FeatureProcessedEmbeddingBagCollection}
    others = {kind: to for kind, to in mapping.items() if kind not in processed}
    model = _swapped(model, processed, _requested(fp_weight_dtype, output_dtype, per_table_weight_dtype))
    return _swapped(model, others, _requested(quantization_dtype, output_dtype, per_table_weight_dtype))


def set_pruning_data(
    model: nn.Module,
    tables_to_rows_post_pruning: dict[str, int],
    module_types: Sequence[type[nn.Module]] | None = None,
) -> nn.Module:
    """Quantizing the model keeps only the first rows of some tables.

    Args:
        model: is marked and returned.
        tables_to_rows_post_pruning: table -> the rows that it keeps.
        module_types: the types of collections. Default: pooled collections, also after feature processors.
    """
    kinds = module_types or [embedding.EmbeddingBagCollection, models.FeatureProcessedEmbeddingBagCollection]
    name = quant.MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT
    quant.for_each_module_of_type_do(model, kinds, lambda part: setattr(part, name, tables_to_rows_post_pruning))
    return model


def shard_quant_model(
    model: nn.Module,
    world_size: int = 1,
    compute_device: str = "cuda",
    sharding_device: str = "meta",
    sharders: Sequence[Any] | None = None,
    device_memory_size: int | None = None,
    constraints: dict[str, ParameterConstraints] | None = None,
    ddr_cap: int | None = None,
    sharding_plan: ShardingPlan | None = None,
) -> tuple[nn.Module, ShardingPlan]:
    """Splits the tables of a quantized model over devices of this process, by `shard_for_inference`.

    Args:
        model: with quantized collections. It is not changed.
        world_size: the number of devices. Several "cpu" devices are virtual ones.
        compute_device: "cpu" or "cuda".
        sharding_device: accepted as in TorchRec. Shards are copied to their devices one after the other.
        sharders: accepted as in TorchRec. The collections of the model determine what is sharded.
        device_memory_size: bytes of a CUDA device, for the plan. Default: as the machine has.
        constraints: of the plan.
        ddr_cap: bytes of the host, for the plan. Default: as the machine has.
        sharding_plan: Default: planned for the shortest forward.

    Returns:
        The model with sharded collections, and its plan.

    Raises:
        PlanError: no plan fits.
    """
    devices = [f"cuda:{number}" for number in range(world_size)] if compute_device == "cuda" else ["cpu"] * world_size
    plan = sharding_plan
    if plan is None and (constraints or device_memory_size or ddr_cap):
        sizes: dict[str, Any] = {"hbm_cap": device_memory_size, "ddr_cap": ddr_cap}
        topology = Topology(
            world_size,
            compute_device,
            local_world_size=world_size,
            **{name: size for name, size in sizes.items() if size is not None},
        )
        plan = EmbeddingShardingPlanner(topology, constraints=constraints, cost_model="latency").plan(model)
    served = shard_for_inference(model, plan, devices)
    return served.module, served.plan
