"""Traces a model with torch.export: a program on plain tensors, whose weights are arguments.

::

    program(weights, dense [B, columns], values [N], lengths [F * B], per_id [N] or None) -> one tensor an output

The weights are the first argument, a dict, so that they are stored once, outside the program, and so that several
programs can share them. One program serves every B and N, 0 and 1 included.

Shape letters: B samples, F sparse features, N ids of all features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from recshard_lab.serving.batch import Batch, Inputs
from recshard_lab.sparse import KeyedJaggedTensor, KeyedTensor

Outputs = Mapping[str, Callable[[Tensor], Tensor] | None]
"""Names of a model's outputs, in order; each with a function that is applied to it, such as ``torch.sigmoid``."""

_MOST = 2**40  # samples or ids; int64 sizes that cannot overflow when multiplied by a number of features


class Program(nn.Module):
    """A model as a function of its weights and of plain tensors.

    Args:
        model: takes ``(dense, KeyedJaggedTensor)``, or only the one that `inputs` has.
        inputs, outputs: of the model.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, outputs: Outputs) -> None:
        super().__init__()
        self._model = [model]  # in a list: its parameters are arguments, not parameters of the program
        self._inputs, self._outputs = inputs, outputs

    def forward(
        self, weights: dict[str, Tensor], dense: Tensor, values: Tensor, lengths: Tensor, per_id: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Computes the outputs, each ``[B]`` or ``[B, ...]``."""
        arguments: list[Any] = [dense] if self._inputs.dense else []
        if self._inputs.sparse:
            keys, size = self._inputs.names(), dense.shape[0]
            if per_id is not None:
                torch._check(per_id.shape[0] == values.shape[0])
                per_id = per_id.narrow(0, 0, values.shape[0])  # from here on one symbol for both sizes
            arguments.append(KeyedJaggedTensor._unchecked(keys, values, per_id, lengths, stride=size))
            arguments[-1]._length_per_key = _counts(values, lengths, len(keys), size)
        answer = torch.func.functional_call(self._model[0], weights, tuple(arguments))
        return tuple(
            _shaped(column if function is None else function(column))
            for column, function in zip(_columns(answer, list(self._outputs)), self._outputs.values(), strict=True)
        )


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: weight.detach() for name, weight in named.items()}


def trace(model: nn.Module, inputs: Inputs, outputs: Outputs, example: Batch) -> ExportedProgram:
    """Traces a model.

    Args:
        model: in evaluation mode.
        inputs, outputs: of the model.
        example: of any size.
    """
    symbols: Any = import_module("torch.fx.experimental._config")

    weights = weights_of(model)
    size, ids = Dim("B", min=0, max=_MOST), Dim("N", min=0, max=_MOST)
    features = len(inputs.sparse)
    shapes = {
        "weights": dict.fromkeys(weights),
        "dense": {0: size},
        "values": {0: ids} if features else None,
        "lengths": {0: features * size} if features else None,
        "per_id": {0: ids} if inputs.weighted else None,
    }
    arguments = (weights, example.dense, example.values, example.lengths.long(), example.weights)
    # sizes 0 and 1 are traced like all others
    with torch.no_grad(), symbols.patch(backed_size_oblivious=True):
        return torch.export.export(
            Program(model, inputs, outputs),
            arguments,
            dynamic_shapes=shapes,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )


def _counts(values: Tensor, lengths: Tensor, features: int, size: int) -> list[int]:
    """Ids of each feature. Tells the tracer that they are consecutive parts of all values."""
    counts: list[int] = lengths.view(features, size).sum(1).tolist()
    total = 0
    for count in counts:
        torch._check(count >= 0)
        total = total + count
        torch._check(total <= values.shape[0])
    torch._check(total == values.shape[0])
    return counts


def _columns(answer: Any, names: list[str]) -> list[Tensor]:
    """The outputs of a model, in order."""
    if isinstance(answer, Mapping):
        missing = [name for name in names if name not in answer]
        if missing:
            raise ValueError(f"the model returns {sorted(answer)}, not {missing[0]!r}. Fix: correct outputs=")
        columns = [answer[name] for name in names]
    elif isinstance(answer, (tuple, list)):
        columns = list(answer)
    else:
        columns = [answer.values() if isinstance(answer, KeyedTensor) else answer]
    if len(columns) != len(names):
        raise ValueError(f"the model returns {len(columns)} tensors, but outputs= has {len(names)} names: {names}")
    for name, column in zip(names, columns, strict=True):
        if not isinstance(column, Tensor):
            raise ValueError(
                f"output {name!r} is a {type(column).__name__}, not a tensor. Fix: return a tensor [B, ...]"
            )
    return columns


def _shaped(column: Tensor) -> Tensor:
    """``[B, 1]`` becomes ``[B]``."""
    return column.squeeze(1) if column.dim() == 2 and column.shape[1] == 1 else column
