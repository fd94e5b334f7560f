"""TorchRec's torch.fx tracer, and its markers in a graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from recshard_lab.distributed import DistributedModelParallel, LazyAwaitable, NoWait, ShardedCollection
from recshard_lab.embedding import QuantEmbeddingBagCollection, QuantEmbeddingCollection

_LEAVES = (ShardedCollection, QuantEmbeddingBagCollection, QuantEmbeddingCollection)
_tracing = False


def is_fx_tracing() -> bool:
    """Whether a `Tracer` is tracing.

    >>> is_fx_tracing()
    False
    """
    return _tracing


class Tracer(fx.Tracer):
    """``torch.fx.Tracer`` for models with embedding collections.

    Sharded collections are leaves, because their lookup exchanges data between ranks. So are quantized ones. A traced
    `DistributedModelParallel` is one call of its wrapped module.

    Args:
        leaf_modules: names of classes whose modules are leaves: the graph calls them and does not show their inside.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> [node.op for node in Tracer(leaf_modules=["Sequential"]).trace(model).nodes]
    ['placeholder', 'call_module', 'output']
    """

    def __init__(self, leaf_modules: list[str] | None = None) -> None:
        super().__init__()
        self._leaf_modules = [] if leaf_modules is None else leaf_modules

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether the graph calls a module instead of showing its inside."""
        named = type(m).__name__ in self._leaf_modules or isinstance(m, _LEAVES)
        return named or super().is_leaf_module(m, module_qualified_name)

    def trace(self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """The graph of a module or function.

        Args:
            root: what is traced.
            concrete_args: arguments that become constants of the graph.
        """
        global _tracing
        before, _tracing = _tracing, True
        try:
            if isinstance(root, DistributedModelParallel):
                return self._of_wrapped(root, concrete_args or {})
            return super().trace(root, concrete_args)
        finally:
            _tracing = before

    def _of_wrapped(self, root: DistributedModelParallel, concrete_args: dict[str, Any]) -> fx.Graph:
        self.root = root
        graph = fx.Graph()
        arguments = {
            name: concrete_args[name] if name in concrete_args else graph.placeholder(name)
            for name in inspect.signature(root.module.forward).parameters
        }
        graph.output(graph.call_module("_dmp_wrapped_module", kwargs=arguments))
        return graph

    def create_arg(self, a: Any) -> Any:
        """A value as an argument of a node. Waits for a lazy result, and builds a `NoWait` in the graph."""
        if isinstance(a, NoWait):
            return self.create_node("call_function", NoWait, (self.create_arg(a.wait()),), {}, type_expr=NoWait)
        return super().create_arg(a.wait() if isinstance(a, LazyAwaitable) else a)


def symbolic_trace(
    root: nn.Module | Callable[..., Any],
    concrete_args: dict[str, Any] | None = None,
    leaf_modules: list[str] | None = None,
) -> fx.GraphModule:
    """A module with the graph of `root`, traced by `Tracer`. Arguments are those of `Tracer` and its `trace`.

    >>> symbolic_trace(nn.Linear(2, 1)).graph.find_nodes(op="placeholder")
    [input_1]
    """
    tracer = Tracer(leaf_modules)
    graph = tracer.trace(root, concrete_args)
    return fx.GraphModule(tracer.root, graph, type(root).__name__)


@fx.wrap
def _fx_marker(s: str, any_proxy_unused: Any) -> None:
    """A node without effect."""


def fx_marker(s: str, any_proxy_unused: Any) -> None:
    """Puts a node without effect into the graph that is being traced. Outside of tracing it has no effect.

    Args:
        s: name of the marker.
        any_proxy_unused: any traced value.
    """
    if is_fx_symbolic_tracing():
        _fx_marker(s, any_proxy_unused)


def is_marker_node(node: fx.Node, marker_name: str) -> bool:
    """Whether a node is the marker of this name."""
    return node.op == "call_function" and node.target is _fx_marker and node.args[:1] == (marker_name,)


def assert_fx_safe(condition: bool, message: str) -> None:
    """Asserts a condition. During tracing it has no effect.

    Raises:
        AssertionError: the condition is False.
    """
    if not is_fx_symbolic_tracing() and not condition:
        raise AssertionError(message)
