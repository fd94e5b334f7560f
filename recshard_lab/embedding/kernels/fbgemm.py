"""fbgemm's table-batched embeddings (TBE) behind `LookupKernel`.

One TBE serves all pooled shards of one dtype, of any widths; not pooled, all shards of one dtype and width. Its fused
backward is autograd's: the kernel keeps the looked-up rows with their graph, and `backward` runs it.

::

                    CPU                                CUDA
    optimizers      SGD, Adagrad, row-wise Adagrad     all
    weight decay    none                               row-wise Adagrad: L2, decoupled. Adams, LAMBs, LARS: decoupled
    weights         FP32, FP16                         FP32, FP16

The first kernel imports ``fbgemm_gpu``.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from recshard_lab.embedding.configs import DataType
from recshard_lab.embedding.kernels.base import (
    KernelInput,
    KernelSpec,
    LookupKernel,
    RowNorms,
    ShardSpec,
    notice_once,
    register_kernel,
)
from recshard_lab.embedding.kernels.transposed import FeatureGroups
from recshard_lab.embedding.optimizers import EmbOptimType, OptimizerSpec, WeightDecayMode

_TRAINING = "split_table_batched_embeddings_ops_training"
_CPU_OPTIMIZERS = {EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD}
_NO_DECAY = {EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD}
_TRUST_RATIO = {EmbOptimType.LAMB, EmbOptimType.PARTIAL_ROWWISE_LAMB, EmbOptimType.LARS_SGD}
_DEVICES = ("cpu", "cuda")
_DATA_TYPES = (DataType.FP32, DataType.FP16)
_MOST_CUDA_COLUMNS = 2048


class _Pending:
    """A lookup whose backward has not run."""


@contextmanager
def _deterministic() -> Iterator[None]:
    """Torch's deterministic mode. On CUDA, TBE otherwise adds rows with more than 1,024 uses by atomics, in any order.

    Uses the functions below ``torch.use_deterministic_algorithms``, which imports ``torch._inductor``.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])
        torch._C._set_deterministic_fill_uninitialized_memory(fills)


@register_kernel
class FbgemmKernel(LookupKernel):
    """`LookupKernel` on ``SplitTableBatchedEmbeddingBagsCodegen``.

    Trust ratios differ from the other kernels': where the weights of a row are all zero, fbgemm's LAMB and LARS do not
    step the row, and where the step is all zero too they divide by zero.
    """

    name = "fbgemm"

    @classmethod
    def preference(cls, spec: KernelSpec) -> int:
        """First on CUDA; on CPU after numba, and last for Adagrad, whose backward takes 2x the native kernel's time."""
        slow = spec.optimizer is not None and spec.optimizer.optimizer is EmbOptimType.EXACT_ADAGRAD
        return -10 if slow and spec.device.type == "cpu" else 10

    @classmethod
    def unavailable(cls) -> str | None:
        return why_absent()

    @classmethod
    def refuses(cls, spec: KernelSpec) -> str | None:
        kind, optimizer = spec.device.type, spec.optimizer
        if kind not in _DEVICES:
            return f"it runs on cpu and cuda, not on {kind}"
        if optimizer is None:
            return "it always steps an optimizer in backward, and keeps no gradients"
        if kind == "cuda" and (reason := why_no_cuda()) is not None:
            notice_once(f"kernel 'fbgemm' is not used on CUDA: {reason}")
            return reason
        if kind == "cpu" and optimizer.optimizer not in _CPU_OPTIMIZERS:
            return f"it has no {optimizer.optimizer} on CPU"
        if (reason := _refuses_extras(kind, optimizer)) is not None:
            return reason
        if optimizer.row_wise and spec.joins_norms:
            return f"{optimizer.optimizer} over column shards needs the norms of whole rows inside its step"
        return next((reason for shard in spec.shards if (reason := _refuses_shard(kind, shard, optimizer))), None)

    def _allocate(self) -> None:
        optimizer = self.optimizer
        assert optimizer is not None  # `refuses` needs one
        if optimizer.optimizer in _TRUST_RATIO:
            notice_once(
                f"fbgemm's {optimizer.optimizer} does not step rows of zeros, and a row with a zero step becomes NaN. "
                f"Fix, if your tables have such rows: backend='native'"
            )
        self._shard_features = self.features_by_shard()
        self._weights = [torch.empty(0, device=self.device)] * len(self.shards)
        self._states = [{}] * len(self.shards)
        self._members = self._alike()
        # TBE sums the shard features of a shard only if they are neighbours
        groups = [
            [feature for index in indices for feature in self._shard_features[index]] for indices in self._members
        ]
        pairs = zip(self._members, groups, strict=True)
        self._tbes = [self._make_tbe(indices, features, optimizer) for indices, features in pairs]
        counts = "iter" in optimizer.state_shapes(1, 1)
        sizes = [len(indices) if counts else 0 for indices in self._members]
        self._iterations = [torch.zeros(size, dtype=torch.int64, device=self.device) for size in sizes]
        self._hold_views()
        self._versions = [iterations._version for iterations in self._iterations]
        for indices in self._members:
            for index in indices:
                self._weights[index].zero_()
        self._features = FeatureGroups([self.shards[shard].num_cols for shard in self.features], groups, self.device)

    def _alike(self) -> list[list[int]]:
        """The shards that one TBE can serve. TBE refuses shards without a shard feature: these get plain tensors."""
        members: dict[tuple[DataType, int], list[int]] = {}
        for index, shard in enumerate(self.shards):
            if self._shard_features[index]:
                members.setdefault(self._key_of(index, shard), []).append(index)
            else:
                self._weights[index], self._states[index] = self._zeros(shard)
        return list(members.values())

    def _key_of(self, index: int, shard: ShardSpec) -> tuple[DataType, int]:
        """Equal for shards that one TBE serves."""
        return shard.data_type, 0 if self.pooled else shard.num_cols

    def _make_tbe(self, indices: list[int], features: list[int], optimizer: OptimizerSpec) -> Any:
        f = _fbgemm()
        shards = [self.shards[index] for index in indices]
        place = {index: position for position, index in enumerate(indices)}
        row_wise_adagrad = optimizer.optimizer is EmbOptimType.EXACT_ROWWISE_ADAGRAD  # the others have one mode
        mode = optimizer.weight_decay_mode if row_wise_adagrad else None
        tbe = f.SplitTableBatchedEmbeddingBagsCodegen(
            **self._memory(indices),
            feature_table_map=[place[self.features[feature]] for feature in features],
            weights_precision=getattr(f.SparseType, shards[0].data_type.value),
            output_dtype=f.SparseType.FP32,
            optimizer=f.EmbOptimType(optimizer.optimizer.value),
            learning_rate=optimizer.learning_rate,
            eps=optimizer.eps,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            momentum=optimizer.momentum,
            eta=optimizer.eta,
            weight_decay=optimizer.weight_decay,
            weight_decay_mode=f.WeightDecayMode((mode or WeightDecayMode.NONE).value),
            stochastic_rounding=False,  # to nearest, as every other kernel
            pooling_mode=f.PoolingMode.SUM if self.pooled else f.PoolingMode.NONE,
            device=self.device,
            bounds_check_mode=f.BoundsCheckMode.NONE,  # its other modes print or move wrong ids
        )
        tbe.iter = torch.zeros(1, dtype=torch.int64)  # on the host: TBE reads it in forward
        return tbe

    def _memory(self, indices: Sequence[int]) -> dict[str, Any]:
        """Where a TBE stores the rows of its shards, as arguments of its constructor."""
        f, on_cpu = _fbgemm(), self.device.type == "cpu"
        location = f.EmbeddingLocation.HOST if on_cpu else f.EmbeddingLocation.DEVICE
        compute = f.ComputeDevice.CPU if on_cpu else f.ComputeDevice.CUDA
        sizes = [(self.shards[index].num_rows, self.shards[index].num_cols) for index in indices]
        return {"embedding_specs": [(*size, location, compute) for size in sizes]}

    def _hold_views(self) -> None:
        """Takes the shards' weights and states from the memory of the TBEs."""
        assert self.optimizer is not None
        names = [name for name in self.optimizer.state_shapes(1, 1) if name != "iter"]
        self._pending: WeakSet[_Pending] = WeakSet()  # what is dropped has no backward
        self._versions = [-1] * len(self._tbes)  # as if written to: the counts are read before the next lookup
        self._steps = [0] * len(self._tbes)
        for tbe, indices, iterations in zip(self._tbes, self._members, self._iterations, strict=True):
            states = tbe.split_optimizer_states()
            for position, (index, weight) in enumerate(zip(indices, tbe.split_embedding_weights(), strict=True)):
                self._weights[index] = weight
                self._states[index] = dict(zip(names, states[position], strict=True)) if names else {}
                if iterations.numel():
                    self._states[index]["iter"] = iterations[position : position + 1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pending": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes the views anew: a copied or unpickled TBE has separate memory."""
        self.__dict__.update(state)
        self._hold_views()

    def set_learning_rate(self, lr: float) -> None:
        for tbe in self._tbes:
            tbe.set_learning_rate(lr)

    def forward(self, batch: KernelInput, train: bool) -> tuple[Tensor, Any]:
        self.check_weights(batch.weights)
        # TBE ignores strides
        ids, offsets = batch.ids.contiguous(), batch.offsets.contiguous()
        weights = None if batch.weights is None else batch.weights.detach().float().contiguous()
        spans, samples = self._features.spans(offsets, self.pooled, batch.counts)
        looked: list[tuple[Tensor, Tensor | None]] = []
        for index, tbe in enumerate(self._tbes):
            own_ids = self._features.take(ids, index, spans)
            own_offsets = self._features.take_offsets(offsets, index, samples)
            own_weights = None if weights is None else self._features.take(weights, index, spans)
            self._number_step(index, tbe)
            own_weights = None if own_weights is None else own_weights.detach().requires_grad_()
            with torch.enable_grad():
                out = self._look_up(index, own_ids, own_offsets, own_weights)
                looked.append((out, own_weights))
        pending = _Pending()
        self._pending.add(pending)
        outputs = [out.detach() for out, _ in looked]
        joined = self._features.join_pooled(outputs) if self.pooled else self._features.join_flat(outputs, spans)
        return joined, (looked, spans, pending)

    def _look_up(self, index: int, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """The rows of one TBE, with their graph."""
        found: Tensor = self._tbes[index](ids, offsets, per_sample_weights=weights)
        return found

    def _number_step(self, index: int, tbe: Any) -> None:
        """Sets the step number of the lookup's backward. TBE counts lookups, but an evaluation has no backward.

        The counts are on the device, where checkpoints are loaded into them. They are read after such a write only.
        """
        iterations = self._iterations[index]
        if not iterations.numel():
            return
        if iterations._version != self._versions[index]:
            taken = set(iterations.tolist())
            if len(taken) > 1:
                names = ", ".join(repr(self.shards[shard].table) for shard in self._members[index])
                raise ValueError(
                    f"tables {names} have taken {sorted(taken)} steps, and fbgemm counts one number for all of them. "
                    f"Fix: use backend='native'"
                )
            self._versions[index], self._steps[index] = iterations._version, taken.pop()
        tbe.iter_cpu.fill_(self._steps[index] + len(self._pending))
        tbe.iter.copy_(tbe.iter_cpu)

    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        looked, spans, pending = saved
        weight_grads = []
        for index, (out, weights) in enumerate(looked):
            if self.pooled:
                own = self._features.take_pooled_grad(grad, index)
            else:
                own = self._features.take_flat_grad(grad, index, spans)
            with _deterministic() if self.spec.deterministic else nullcontext():
                torch.autograd.backward(out, own.to(out.dtype).contiguous().view_as(out))
            if weights is not None:
                weight_grads.append(weights.grad)
        self._pending.discard(pending)
        for index, iterations in enumerate(self._iterations):
            known = iterations._version == self._versions[index]
            iterations += 1
            if known:
                self._steps[index] += 1
                self._versions[index] = iterations._version
        return self._features.join_flat(weight_grads, spans) if weight_grads else None


def _refuses_extras(device: str, optimizer: OptimizerSpec) -> str | None:
    kind, mode = optimizer.optimizer, optimizer.weight_decay_mode
    missing = [name for name in optimizer.extras if name != "weight_decay"]
    if missing:
        return f"it has no {', '.join(missing)} with the meaning that {kind} has here"
    if optimizer.weight_decay and (device == "cpu" or kind in _NO_DECAY):
        return f"it ignores weight_decay with {kind} on {device}"
    if mode is WeightDecayMode.L2 and kind is not EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        return f"it has no weight_decay_mode L2 with {kind}"
    return None


def _refuses_shard(device: str, shard: ShardSpec, optimizer: OptimizerSpec) -> str | None:
    table = f"table {shard.table!r}"
    if shard.data_type not in _DATA_TYPES:
        return f"{table} is {shard.data_type.value}; it trains {' and '.join(kind.value for kind in _DATA_TYPES)}"
    if shard.num_cols % 4:
        return f"{table} has {shard.num_cols} columns here; it needs a multiple of 4"
    if device == "cuda" and shard.num_cols > _MOST_CUDA_COLUMNS:
        return f"{table} has {shard.num_cols} columns here; on cuda it takes at most {_MOST_CUDA_COLUMNS}"
    if optimizer.row_wise and shard.num_cols != shard.full_dim:
        return f"{table} has {shard.num_cols} of {shard.full_dim} columns here; {optimizer.optimizer} needs all"
    return None


@cache
def why_absent() -> str | None:
    """Why fbgemm does not load here, or None."""
    if find_spec("fbgemm_gpu") is None:
        return 'fbgemm_gpu is not installed (pip install "recshard-lab[cpu]" or "[cuda]" brings it)'
    try:
        _fbgemm()
    except Exception as error:  # a build for another torch fails with any exception of its loader
        version = next((v for n in ("fbgemm-gpu", "fbgemm-gpu-cpu") if (v := _version(n))), "of unknown version")
        return f"fbgemm_gpu {version} does not load beside torch {torch.__version__}: {error}"
    return None


@cache
def why_no_cuda() -> str | None:
    """Why the installed build has no CUDA kernels, or None. Both builds have one import name."""
    if _version("fbgemm-gpu-cpu") is not None:
        return 'the installed fbgemm-gpu-cpu has CPU kernels only. Fix: pip install "recshard-lab[cuda]"'
    return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _fbgemm() -> SimpleNamespace:
    """fbgemm's names, imported on first use."""
    # it warns in every process that Adam, LAMB and LARS are compiled without optimisation
    warnings.filterwarnings("ignore", r"(?s).*\[FBGEMM_GPU\] NOTE: The training optimizer")
    warnings.filterwarnings("ignore", "TBE B200 optimization")  # on every GPU, that it is off
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of parts of itself that are not in this build
        names: dict[str, Any] = {}
        for module in ("split_embedding_configs", "split_table_batched_embeddings_ops_common", _TRAINING):
            names.update(vars(import_module(f"fbgemm_gpu.{module}")))
    return SimpleNamespace(**names)
