"""fbgemm's table-batched embeddings (TBE) behind `LookupKernel`.

One TBE serves all pooled slots of one dtype, of any widths; not pooled, all slots of one dtype and width.
Its fused backward is autograd's: the looked-up rows are kept with their graph, and `backward` runs it.

``fbgemm_gpu`` is imported when the first kernel is made, never before.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from recshard_lab.embedding.configs import DataType
from recshard_lab.embedding.kernels.base import NO_WEIGHTS, LookupKernel, RowNorms, Slot
from recshard_lab.embedding.kernels.feature_groups import FeatureGroups, Spans
from recshard_lab.embedding.kernels.registry import register_kernel
from recshard_lab.embedding.optimizers import EmbOptimType, OptimizerSpec

_OPTIMIZERS = {EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD}
_TRAINING = "split_table_batched_embeddings_ops_training"
_DATA_TYPES = {DataType.FP32, DataType.FP16}


@register_kernel
class FbgemmKernel(LookupKernel):
    """`LookupKernel` on ``SplitTableBatchedEmbeddingBagsCodegen``."""

    name = "fbgemm"

    @classmethod
    def preference(cls, optimizer: OptimizerSpec | None, device: torch.device | str) -> int:
        """First everywhere but for Adagrad on CPU, whose backward takes twice the native kernel's time there."""
        slow = optimizer is not None and optimizer.optimizer is EmbOptimType.EXACT_ADAGRAD
        return -10 if slow and torch.device(device).type == "cpu" else 10

    @classmethod
    def unavailable(cls) -> str | None:
        return _why_absent()

    @classmethod
    def refuses(
        cls,
        slots: Sequence[Slot],
        optimizer: OptimizerSpec | None,
        *,
        pooled: bool,
        weighted: bool,
        exchanges_row_norms: bool,
        device: torch.device | str,
    ) -> str | None:
        if optimizer is None:
            return "it always steps an optimizer in backward, gradients cannot be kept"
        if optimizer.optimizer not in _OPTIMIZERS:
            return f"it lacks {optimizer.optimizer} on CPU, and elsewhere nobody has checked it"
        if optimizer.extras:
            return f"it ignores {', '.join(optimizer.extras)} with {optimizer.optimizer}, or means something else by it"
        if weighted and not pooled:
            return NO_WEIGHTS
        if torch.device(device).type not in ("cpu", "cuda"):
            return f"it runs on cpu and cuda, not on {torch.device(device).type}"
        if optimizer.row_wise and exchanges_row_norms:
            return f"{optimizer.optimizer} over column shards needs the norms of whole rows inside its step"
        return next((reason for slot in slots if (reason := _refuses_slot(slot, optimizer))), None)

    def _allocate(self) -> None:
        optimizer = self.optimizer
        assert optimizer is not None  # what has none is refused
        self._slot_features: list[list[int]] = [[] for _ in self.slots]
        for feature, slot in enumerate(self.feature_slots):
            self._slot_features[slot].append(feature)
        self._weights: list[Tensor] = [torch.empty(0)] * len(self.slots)
        self._states: list[dict[str, Tensor]] = [{}] * len(self.slots)
        self._tbes: list[Any] = []
        groups: list[list[int]] = []
        self._members = list(self._alike().values())
        for indices in self._members:
            # TBE adds up what the features of a slot share only if they stand side by side
            features = [feature for index in indices for feature in self._features_of(index)]
            groups.append(features)
            self._tbes.append(self._make_tbe(indices, features, optimizer))
        self._hold_views()
        for indices in self._members:
            for index in indices:
                self._weights[index].zero_()
        self._features = FeatureGroups([self.slots[slot].num_cols for slot in self.feature_slots], groups, self.device)

    def _alike(self) -> dict[tuple[DataType, int], list[int]]:
        """The slots that one TBE can hold; a slot that no feature reads gets plain tensors, for TBE refuses it."""
        members: dict[tuple[DataType, int], list[int]] = {}
        for index, slot in enumerate(self.slots):
            if self._features_of(index):
                members.setdefault((slot.data_type, 0 if self.pooled else slot.num_cols), []).append(index)
            else:
                self._hold_unread(index, slot)
        return members

    def _features_of(self, index: int) -> list[int]:
        return self._slot_features[index]

    def _hold_unread(self, index: int, slot: Slot) -> None:
        assert self.optimizer is not None
        dtype = torch.float16 if slot.data_type is DataType.FP16 else torch.float32
        self._weights[index] = torch.zeros(slot.num_rows, slot.num_cols, dtype=dtype, device=self.device)
        shapes = self.optimizer.state_shapes(slot.num_rows, slot.num_cols)
        self._states[index] = {name: torch.zeros(shape, device=self.device) for name, shape in shapes.items()}

    def _make_tbe(self, indices: list[int], features: list[int], optimizer: OptimizerSpec) -> Any:
        f = _fbgemm()
        on_cpu = self.device.type == "cpu"
        location = f.EmbeddingLocation.HOST if on_cpu else f.EmbeddingLocation.DEVICE
        compute = f.ComputeDevice.CPU if on_cpu else f.ComputeDevice.CUDA
        slots = [self.slots[index] for index in indices]
        place = {index: position for position, index in enumerate(indices)}
        return f.SplitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=[(slot.num_rows, slot.num_cols, location, compute) for slot in slots],
            feature_table_map=[place[self.feature_slots[feature]] for feature in features],
            weights_precision=f.SparseType.FP16 if slots[0].data_type is DataType.FP16 else f.SparseType.FP32,
            optimizer=f.EmbOptimType(optimizer.optimizer.value),
            learning_rate=optimizer.learning_rate,
            eps=optimizer.eps,
            stochastic_rounding=False,  # round to nearest, as every other kernel does
            pooling_mode=f.PoolingMode.SUM if self.pooled else f.PoolingMode.NONE,
            device=self.device,
            bounds_check_mode=f.BoundsCheckMode.NONE,  # its other modes print or move wrong ids
        )

    def _hold_views(self) -> None:
        """Finds the slots' weights and states in the memory of the TBEs."""
        assert self.optimizer is not None
        names = list(self.optimizer.state_shapes(1, 1))
        for tbe, indices in zip(self._tbes, self._members, strict=True):
            states = tbe.split_optimizer_states()
            for position, (index, weight) in enumerate(zip(indices, tbe.split_embedding_weights(), strict=True)):
                self._weights[index] = weight
                self._states[index] = dict(zip(names, states[position], strict=True)) if names else {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copied or unpickled TBE has memory of its own, in which the views must be found again."""
        self.__dict__.update(state)
        self._hold_views()

    def weights(self) -> list[Tensor]:
        return self._weights

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        return self._states

    def set_learning_rate(self, lr: float) -> None:
        for tbe in self._tbes:
            tbe.set_learning_rate(lr)

    def forward(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, counts: Sequence[int] | None = None
    ) -> tuple[Tensor, Any]:
        self.check_weights(weights)
        # TBE reads memory from the first element on, whatever the strides
        ids, offsets = ids.contiguous(), offsets.contiguous()
        weights = None if weights is None else weights.detach().float().contiguous()
        spans, batch = self._features.spans(offsets, self.pooled, counts)
        looked: list[tuple[Tensor, Tensor | None]] = []
        for index, tbe in enumerate(self._tbes):
            own_ids = self._features.take(ids, index, spans)
            own_offsets = self._features.take_offsets(offsets, index, batch if self.pooled else 1)
            own_weights = None if weights is None else self._features.take(weights, index, spans)
            with torch.enable_grad():
                if own_weights is not None:
                    own_weights = own_weights.detach().requires_grad_()
                looked.append((self._look_up(tbe, index, own_ids, own_offsets, own_weights), own_weights))
        return self._join([out.detach() for out, _ in looked], spans), (looked, spans)

    def _look_up(self, tbe: Any, index: int, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        if self.pooled:
            return tbe(ids, offsets, per_sample_weights=weights)
        return tbe(ids, offsets)

    def _join(self, outputs: list[Tensor], spans: Spans) -> Tensor:
        if not self.pooled:
            return self._features.join_flat(outputs, spans)
        if self._features.whole:
            return outputs[0]
        dims = [[self._features.feature_dims[feature] for feature in group] for group in self._features.groups]
        return self._features.join_pooled([out.split(own, dim=1) for out, own in zip(outputs, dims, strict=True)])

    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        looked, spans = saved
        weight_grads = []
        for index, (out, weights) in enumerate(looked):
            if self.pooled:
                own = self._features.take_pooled_grad(grad, index)
            else:
                own = self._features.take_flat_grad(grad, index, spans)
            torch.autograd.backward(out, own.to(out.dtype).contiguous().view_as(out))
            if weights is not None:
                weight_grads.append(weights.grad)
        return self._features.join_flat(weight_grads, spans) if weight_grads else None


def _refuses_slot(slot: Slot, optimizer: OptimizerSpec) -> str | None:
    table = f"table {slot.table!r}"
    if slot.data_type not in _DATA_TYPES:
        return f"{table} is {slot.data_type.value}; it trains FP32 and FP16"
    if slot.num_cols % 4:
        return f"{table} has {slot.num_cols} columns here; it needs a multiple of 4"
    if optimizer.row_wise and slot.num_cols != slot.full_dim:
        return f"{table} has {slot.num_cols} of {slot.full_dim} columns here; {optimizer.optimizer} needs all"
    return None


@cache
def _why_absent() -> str | None:
    if find_spec("fbgemm_gpu") is None:
        return 'fbgemm_gpu is not installed (pip install "recshard-lab[cpu]" or "[cuda]" brings it)'
    try:
        _fbgemm()
    except Exception as error:  # a build for another torch fails with whatever its loader raises
        version = next((v for n in ("fbgemm-gpu", "fbgemm-gpu-cpu") if (v := _version(n))), "of unknown version")
        return f"fbgemm_gpu {version} does not load beside torch {torch.__version__}: {error}"
    return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _fbgemm() -> SimpleNamespace:
    """fbgemm's names, imported on first use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of parts of itself that are not in this build
        names: dict[str, Any] = {}
        for module in ("split_embedding_configs", "split_table_batched_embeddings_ops_common", _TRAINING):
            names.update(vars(import_module(f"fbgemm_gpu.{module}")))
    return SimpleNamespace(**names)
