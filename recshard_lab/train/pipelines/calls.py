"""Which sharded collections of a model can receive their ids ahead, and from which part of the batch.

The first batch runs as it would without a pipeline, and its calls of sharded collections are recorded. If a call
receives a KeyedJaggedTensor of the batch itself, its place in the batch is known. Otherwise the model computes the ids
from the batch, and torch.fx traces this computation. It runs ahead if it has no parameters and no random numbers, and
returns the same ids as the model. Otherwise the call stays in the forward, and `PipelineReport` has the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from recshard_lab.distributed import DistributedModelParallel, ShardedCollection
from recshard_lab.sparse import KeyedJaggedTensor

Way = Callable[[Any], KeyedJaggedTensor]
_DEPTH = 4  # levels of a batch that are searched


@dataclass(frozen=True)
class PipelinedCall:
    """A call of a sharded collection in the model's forward.

    Attributes:
        module: the collection's path.
        place: the source of its ids: ``batch.sparse_features``, or ``traced``.
        reason: why its ids are not sent ahead; empty if they are.
    """

    module: str
    place: str = ""
    reason: str = ""

    @property
    def pipelined(self) -> bool:
        """Whether its ids are sent ahead."""
        return not self.reason


@dataclass(frozen=True)
class PipelineReport:
    """What a pipeline overlaps: one line per call of a sharded collection.

    >>> print(PipelineReport((PipelinedCall("ebc", "batch.sparse_features"),)))
    ebc: its ids are sent ahead, from batch.sparse_features
    """

    calls: tuple[PipelinedCall, ...]
    note: str = ""

    @property
    def pipelined(self) -> list[str]:
        """The collections whose ids are sent ahead."""
        return [call.module for call in self.calls if call.pipelined]

    @property
    def left(self) -> dict[str, str]:
        """The other collections, with the reason."""
        return {call.module: call.reason for call in self.calls if not call.pipelined}

    def __str__(self) -> str:
        lines = [
            f"{call.module or 'the model'}: "
            + (f"its ids are sent ahead, from {call.place}" if call.pipelined else f"not pipelined: {call.reason}")
            for call in self.calls
        ]
        return "\n".join([*lines, *([self.note] if self.note else [])]) or "the model has no sharded collection"


@dataclass
class Fed:
    """A call whose ids are sent ahead.

    Attributes:
        number: the call's number among those of its collection in one forward, from 0.
        checked: whether the forward must pass the same object; a traced computation makes a new one.
    """

    module: ShardedCollection
    path: str
    number: int
    way: Way
    checked: bool


@dataclass
class Watch:
    """The arguments of all calls of sharded collections in one forward."""

    paths: Mapping[ShardedCollection, str]
    trace: bool = True
    seen: list[tuple[ShardedCollection, KeyedJaggedTensor]] = field(default_factory=list)

    def __call__(self, module: ShardedCollection, features: KeyedJaggedTensor) -> Any:
        self.seen.append((module, features))
        return module.send(features).wait()

    def plan(self, batch: Any, model: nn.Module) -> tuple[list[Fed], PipelineReport]:
        """The calls whose ids are sent ahead, from the next batch."""
        fed, told = [], []
        known: dict[ShardedCollection, int] = {}
        for module, features in self.seen:
            number = known.get(module, 0)
            known[module] = number + 1
            found = next(_places(batch, features, "batch"), None)
            place, way = found if found is not None else ("traced", None)
            reason = ""
            weights = features.weights_or_none()
            if weights is not None and weights.requires_grad:
                way, reason = None, "its per-sample weights are learned, so they change in every step"
            elif way is None and not self.trace:
                reason = "the model computes its ids from the batch, and pipeline_postproc=False"
            elif way is None:
                try:
                    way = traced_way(model, module, number)
                    if not same_ids(way(batch), features):
                        reason = "the model computes other ids from the same batch at every call"
                except Untraceable as error:
                    reason = str(error)
                except Exception as error:
                    reason = f"the traced computation of its ids raises {type(error).__name__}: {_first_line(error)}"
            told.append(PipelinedCall(self.paths[module], place, reason))
            if not reason:
                assert way is not None
                fed.append(Fed(module, self.paths[module], number, way, found is not None))
        never = [PipelinedCall(path, "", "not called") for module, path in self.paths.items() if module not in known]
        return fed, PipelineReport((*told, *never))


def sharded_collections(model: nn.Module) -> dict[ShardedCollection, str]:
    """The sharded collections of a model, and their paths in it."""
    found: dict[ShardedCollection, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, DistributedModelParallel):
            found |= {collection: own for own, collection in module.collections.items()}
        elif isinstance(module, ShardedCollection) and module not in found:
            found[module] = path
    return found


def _places(value: Any, target: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, Way]]:
    """The places in ``value`` of the object ``target`` itself."""
    if value is target:
        yield name, lambda batch: batch
    if depth == 0 or isinstance(value, torch.Tensor | KeyedJaggedTensor | str | bytes):
        return
    for word, key, part in _parts(value):
        for place, way in _places(part, target, f"{name}{word}", depth - 1):
            yield place, _through(key, way)


def _parts(value: Any) -> Iterator[tuple[str, Callable[[Any], Any], Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield f"[{key!r}]", _item(key), part
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield f"[{number}]", _item(number), part
    elif dataclasses.is_dataclass(value) or hasattr(value, "__dict__") or hasattr(value, "__slots__"):
        names = [*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())]
        for name in names:
            if hasattr(value, name):
                yield f".{name}", _attribute(name), getattr(value, name)


def _item(key: Any) -> Callable[[Any], Any]:
    return lambda value: value[key]


def _attribute(name: str) -> Callable[[Any], Any]:
    return lambda value: getattr(value, name)


def _through(key: Callable[[Any], Any], way: Way) -> Way:
    return lambda batch: way(key(batch))


def same_ids(one: KeyedJaggedTensor, other: Any) -> bool:
    """Whether two batches of ids are equal."""
    if not isinstance(other, KeyedJaggedTensor) or one.keys() != other.keys():
        return False
    weights, others = one.weights_or_none(), other.weights_or_none()
    if (weights is None) != (others is None) or not torch.equal(one.lengths(), other.lengths()):
        return False
    same = weights is None or others is None or torch.equal(weights, others)
    return same and torch.equal(one.values(), other.values())


# ---- tracing ----


class Untraceable(ValueError):
    """Why the ids of a collection cannot be computed ahead."""


class _Tracer(torch.fx.Tracer):
    """Traces into the modules that contain a sharded collection, and into no others."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.inner = {id(m) for m in root.modules() if any(isinstance(own, ShardedCollection) for own in m.modules())}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, ShardedCollection) or id(m) not in self.inner


def traced_way(model: nn.Module, module: ShardedCollection, number: int) -> Way:
    """How ``model`` computes the ids of the ``number``-th call of ``module`` from the batch.

    Raises:
        Untraceable: it cannot be traced, or it changes or reads something that a step changes.
    """
    root = _bare(model)
    try:
        graph = _Tracer(root).trace(root)
    except Exception as error:
        raise Untraceable(
            f"its ids are not the batch's own, and the model cannot be traced: {type(error).__name__}: "
            f"{_first_line(error)}"
        ) from error
    calls = [node for node in graph.nodes if node.op == "call_module" and root.get_submodule(node.target) is module]
    if len(calls) <= number:
        raise Untraceable("its ids are not the batch's own, and tracing the model does not meet this call")
    needed = _needed(calls[number].args, calls[number].kwargs)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in needed:
        _refuse(node, inputs, root)
    made = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    batch = made.placeholder("batch")
    for node in graph.nodes:
        if node in needed:
            copies[node] = batch if node.op == "placeholder" else made.node_copy(node, lambda own: copies[own])
    [features] = [*calls[number].args, *calls[number].kwargs.values()][:1]
    made.output(copies[features])
    way: Way = torch.fx.GraphModule(root, made)
    return way


def _bare(model: nn.Module) -> nn.Module:
    """The model that is called with the batch, out of its wrappers."""
    while isinstance(model, DistributedModelParallel | nn.parallel.DistributedDataParallel):
        model = model._dmp_wrapped_module if isinstance(model, DistributedModelParallel) else model.module
    return model


def _needed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[torch.fx.Node]:
    found: set[torch.fx.Node] = set()
    left = [value for value in [*args, *kwargs.values()] if isinstance(value, torch.fx.Node)]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _refuse(node: torch.fx.Node, inputs: Sequence[torch.fx.Node], root: nn.Module) -> None:
    if node.op == "placeholder" and node is not inputs[0]:
        raise Untraceable(f"its ids come from the model's argument {node.target!r}, which is not the batch")
    if node.op == "get_attr":
        raise Untraceable(f"its ids depend on {node.target!r}, which a step may change")
    if node.op == "call_module":
        part = root.get_submodule(str(node.target))
        if isinstance(part, ShardedCollection):
            raise Untraceable(f"its ids depend on what collection {node.target!r} gives")
        if any(True for _ in part.parameters()) or any(True for _ in part.buffers()):
            raise Untraceable(f"its ids go through module {node.target!r}, whose weights a step changes")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")
