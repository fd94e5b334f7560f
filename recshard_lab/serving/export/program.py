"""Traces a model with torch.export: a program on plain tensors, whose weights are arguments.

::

    program(weights, dense [B, columns], values [N], lengths [F * B], per_id [N] or None) -> one tensor an output

The weights are the first argument, a dict, so that they are stored once, outside the program, and so that several
programs can share them. One program serves every B and N, 0 and 1 included.

Shape letters: B samples, F sparse features, N ids of all features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

import torch
import torch.fx.experimental._config
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional

from recshard_lab.functional_calls import call_with
from recshard_lab.serving.batch import Batch, Inputs
from recshard_lab.serving.export.refusals import ExportError, check_exportable, reason_of
from recshard_lab.serving.export.weights import ALIGNMENT
from recshard_lab.sparse import KeyedJaggedTensor, KeyedTensor

if TYPE_CHECKING:
    from recshard_lab.embedding.quantized.collections import QuantCollection

Outputs = Mapping[str, Callable[[Tensor], Tensor] | None]
"""Names of a model's outputs, in order; each with a function that is applied to it, such as ``torch.sigmoid``."""

_NOTES = (
    "stack_trace",
    "nn_module_stack",
    "source_fn_stack",
    "torch_fn",
    "from_node",
    "custom",
)  # paths of this machine
_MOST = 2**40  # samples or ids; int64 sizes that cannot overflow when multiplied by a number of features


class Program(nn.Module):
    """A model as a function of its weights and of plain tensors.

    Args:
        model: takes ``(dense, KeyedJaggedTensor)``, or only the one that `inputs` has. A model that requires both
            gets a dense part ``[B, 0]`` if `inputs` has no dense columns.
        inputs, outputs: of the model.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, outputs: Outputs) -> None:
        super().__init__()
        self._model = [model]  # in a list: its parameters are arguments, not parameters of the program
        self._inputs, self._outputs = inputs, outputs
        self._takes_dense = bool(inputs.dense) or (bool(inputs.sparse) and _required(model) > 1)

    def forward(
        self, weights: dict[str, Tensor], dense: Tensor, values: Tensor, lengths: Tensor, per_id: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Computes the outputs, each ``[B]`` or ``[B, ...]``."""
        arguments: list[Any] = [dense] if self._takes_dense else []
        if self._inputs.sparse:
            keys, size = self._inputs.names(), dense.shape[0]
            if per_id is not None:
                torch._check(per_id.shape[0] == values.shape[0])
                per_id = per_id.narrow(0, 0, values.shape[0])  # from here on one symbol for both sizes
            arguments.append(KeyedJaggedTensor._unchecked(keys, values, per_id, lengths, stride=size))
            arguments[-1]._length_per_key = _counts(values, lengths, len(keys), size)
        with _packed_tables(self._model[0], weights) as others:
            answer = call_with(self._model[0], others, *arguments)
        return tuple(
            _shaped(column if function is None else function(column))
            for column, function in zip(_columns(answer, list(self._outputs)), self._outputs.values(), strict=True)
        )


def _required(model: nn.Module) -> int:
    """Positional arguments that a model's forward requires."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    own = signature(model.forward).parameters.values()
    return sum(one.kind in kinds and one.default is Parameter.empty for one in own)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once, in the order of their names, which is part of the program.

    The tables of a quantized collection are one tensor, ``{collection}.tables``: their kernels read it, and its buffers
    are views of it. It is padded, so that the file can be mapped.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for path, part in _quantized(model).items():
        views = f"{_below(path)}{part.tables_name}."
        named = {name: weight for name, weight in named.items() if not name.startswith(views)}
        named[f"{_below(path)}tables"] = functional.pad(part._packed.flat, (0, -part._packed.flat.numel() % ALIGNMENT))
    return {name: weight.detach() for name, weight in sorted(named.items())}


def trace(model: nn.Module, inputs: Inputs, outputs: Outputs, example: Batch) -> ExportedProgram:
    """Traces a model.

    Args:
        model: in evaluation mode.
        inputs, outputs: of the model.
        example: of any size.

    Raises:
        ExportError: the model cannot be exported, or the program computes other numbers than the model.
    """
    check_exportable(model)
    symbols: Any = torch.fx.experimental._config
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
    arguments = (weights, *arguments_of(model, inputs, example)[1:])
    # sizes 0 and 1 are traced like all others
    with torch.no_grad(), symbols.patch(backed_size_oblivious=True), _attributes_kept(model):
        try:
            program = torch.export.export(
                Program(model, inputs, outputs),
                arguments,
                dynamic_shapes=shapes,
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
        except ExportError:
            raise
        except Exception as error:  # torch's, or the model's
            raise reason_of(error, model) from error
    program.example_inputs = None  # would be saved, with the weights
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            for key in _NOTES:
                node.meta.pop(key, None)
    return program


def arguments_of(model: nn.Module, inputs: Inputs, batch: Batch) -> tuple[Any, ...]:
    """The arguments of a program for a batch."""
    per_id = batch.weights if inputs.weighted else None
    return weights_of(model), batch.dense, batch.values, batch.lengths.long(), per_id


def check_equal(program: Callable[..., Any], model: nn.Module, inputs: Inputs, outputs: Outputs, batch: Batch) -> None:
    """Runs the program and the model on a batch.

    Raises:
        ExportError: an output differs by more than rounding.
    """
    arguments = arguments_of(model, inputs, batch)
    with torch.no_grad():  # not inference_mode: the model may keep a tensor, which it then trains with
        answers = program(*arguments)
        expected = Program(model, inputs, outputs)(*arguments)
    for name, answer, wanted in zip(outputs, answers, expected, strict=True):
        if not torch.allclose(answer, wanted, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise ExportError(
                f"{type(model).__name__} cannot be exported: output {name!r} of the program differs from the model's "
                f"by up to {float((answer - wanted).abs().max()):.3g}, because a number became a constant. "
                f"Fix: compute it from tensors in forward, without random numbers"
            )


def imports_of(program: ExportedProgram) -> list[str]:
    """Modules beside torch that have the operators of a program."""
    used = {str(node.target).partition(".")[0] for node in program.graph.nodes if node.op == "call_function"}
    return ["fbgemm_gpu"] if "fbgemm" in used else []


def _quantized(model: nn.Module) -> dict[str, QuantCollection]:
    from recshard_lab.embedding.quantized.collections import QuantCollection  # a server does not import it

    return {path: part for path, part in model.named_modules() if isinstance(part, QuantCollection)}


def _below(path: str) -> str:
    return f"{path}." if path else ""


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restores the attributes of all modules afterwards: a traced forward may store tensors without numbers there."""
    before = [(part.__dict__, part.__dict__.copy()) for part in model.modules()]
    try:
        yield
    finally:
        for attributes, own in before:
            attributes.clear()
            attributes.update(own)


@contextmanager
def _packed_tables(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Quantized collections read their tables from the weights meanwhile. Gives the weights of all other modules."""
    others, parts = dict(weights), _quantized(model)
    own = {path: part._packed.flat for path, part in parts.items()}
    try:
        for path, part in parts.items():
            # fbgemm compares ids with the end of the tensor
            part._packed.flat = others.pop(f"{_below(path)}tables").narrow(0, 0, own[path].numel())
        yield others
    finally:
        for path, part in parts.items():
            part._packed.flat = own[path]


def _counts(values: Tensor, lengths: Tensor, features: int, size: int) -> list[int]:
    """Ids of each feature. The tracer learns that they are consecutive parts of all values."""
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
            raise ExportError(f"the model returns {sorted(answer)}, not {missing[0]!r}. Fix: correct outputs=")
        columns = [answer[name] for name in names]
    elif isinstance(answer, (tuple, list)):
        columns = list(answer)
    else:
        columns = [answer.values() if isinstance(answer, KeyedTensor) else answer]
    if len(columns) != len(names):
        raise ExportError(
            f"the model returns {len(columns)} tensors, but outputs= has {len(names)} names: {names}. Fix: name each"
        )
    for name, column in zip(names, columns, strict=True):
        if not isinstance(column, Tensor):
            raise ValueError(
                f"output {name!r} is a {type(column).__name__}, not a tensor. Fix: return a tensor [B, ...]"
            )
    return columns


def _shaped(column: Tensor) -> Tensor:
    """``[B, 1]`` becomes ``[B]``."""
    return column.squeeze(1) if column.dim() == 2 and column.shape[1] == 1 else column
