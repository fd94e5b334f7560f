"""``torchrec.distributed.types.ShardedModule``: the base of sharded modules that a user's sharder returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from recshard_lab.comm import Registry
from recshard_lab.compat.mixins import ModuleNoCopyMixin
from recshard_lab.distributed import Awaitable, ShardedCollection

CompIn = TypeVar("CompIn")
DistOut = TypeVar("DistOut")
Out = TypeVar("Out")
ShrdCtx = TypeVar("ShrdCtx")


class ShardedModule(ABC, nn.Module, ModuleNoCopyMixin, Generic[CompIn, DistOut, Out, ShrdCtx]):
    """A module whose forward runs three stages: `input_dist`, `compute`, `output_dist`.

    A subclass defines them. `DistributedModelParallel` does not replicate the parameters that
    `sharded_parameter_names` lists. The library's sharded collections are instances of this class too.

    Args:
        qcomm_codecs_registry: message formats, for the stages to use.
    """

    @abstractmethod
    def __init__(self, qcomm_codecs_registry: Registry | None = None) -> None:
        super().__init__()
        self._qcomm_codecs_registry = {} if qcomm_codecs_registry is None else qcomm_codecs_registry

    @property
    def qcomm_codecs_registry(self) -> Registry:
        """Message formats."""
        return self._qcomm_codecs_registry

    @abstractmethod
    def create_context(self) -> ShrdCtx:
        """What the stages of one batch share."""

    @abstractmethod
    def input_dist(self, ctx: ShrdCtx, *input: Any, **kwargs: Any) -> Awaitable[Awaitable[CompIn]]:
        """Sends the batch. The second wait returns the argument of `compute`."""

    @abstractmethod
    def compute(self, ctx: ShrdCtx, dist_input: CompIn) -> DistOut:
        """This rank's part of the result."""

    @abstractmethod
    def output_dist(self, ctx: ShrdCtx, output: DistOut) -> Any:
        """Sends results to the source ranks. Returns an awaitable of the output."""

    @property
    @abstractmethod
    def unsharded_module_type(self) -> type[nn.Module]:
        """The type of the unsharded module."""

    def compute_and_output_dist(self, ctx: ShrdCtx, input: CompIn) -> Any:
        """`compute`, then `output_dist`."""
        return self.output_dist(ctx, self.compute(ctx, input))

    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """All stages of a batch. Returns what `output_dist` returns."""
        ctx = self.create_context()
        return self.compute_and_output_dist(ctx, self.input_dist(ctx, *input, **kwargs).wait().wait())

    def prefetch(self, dist_input: CompIn, forward_stream: torch.Stream | None = None, ctx: Any = None) -> None:
        """Has no effect: a subclass may move rows into faster memory here."""

    def preprocess_input(self, args: list[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Mapping[str, Any]]:
        """The arguments of a forward, unchanged."""
        return args, kwargs

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of the parameters that are shards: all of them.

        Args:
            prefix: before each name, with a dot between.
        """
        for name, _ in self.named_parameters(prefix):
            yield name


ShardedModule.register(ShardedCollection)
