"""Sharded towers: the tables and the interaction of a tower run on one node, and only its output leaves the node.

A batch takes three steps. Steps 1 and 3 are empty if there is one node::

    1. features     to the rank with the same local number on the tower's node     `tower_exchange`
    2. tower        its tables, sharded over the ranks of the node; its interaction there
    3. output       back to the rank of the samples

The interaction's parameters exist on every rank. Backward averages their gradients over all ranks, so that every rank
has the same state dict and takes the same optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from recshard_lab.comm import ShardingEnv, all_reduce, broadcast
from recshard_lab.distributed.awaitable import Awaitable, Later, LazyAwaitable, NoWait
from recshard_lab.distributed.eager import eager
from recshard_lab.distributed.sharded_collections import ShardedCollection, ShardedModuleContext, node_of
from recshard_lab.distributed.tower_exchange import Destination, ToSources, exchange_forms, peers_of, send_batches
from recshard_lab.embedding import DataType
from recshard_lab.embedding.tower import EmbeddingTower, EmbeddingTowerCollection, tower_input_params
from recshard_lab.functional_calls import call_with
from recshard_lab.optim import CombinedOptimizer, KeyedOptimizer
from recshard_lab.sparse import KeyedJaggedTensor, Multistreamable


@dataclass
class TowerContext(Multistreamable):
    """What the stages of one batch share.

    Attributes:
        embedding_contexts: contexts of the towers' collections. TorchRec's field; empty here.
        batch_sizes: samples of each rank ``[W]``, set by `input_dist`; empty if there is one node.
        error: an error of `compute`, which `output_dist` raises on all ranks.
    """

    embedding_contexts: list[ShardedModuleContext] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    error: Exception | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory of the collections' contexts until the stream has used it."""
        for context in self.embedding_contexts:
            context.record_stream(stream)


class TowerLazyAwaitable(LazyAwaitable[Tensor]):
    """The output of a sharded tower, of another awaitable. `wait` returns the tensor."""

    def __init__(self, awaitable: Awaitable[Tensor]) -> None:
        super().__init__()
        self._awaitable = awaitable

    def _wait_impl(self) -> Tensor:
        return self._awaitable.wait()


@dataclass(slots=True)
class TowerRows:
    """What a tower computed on this rank.

    Attributes:
        rows: the output ``[B, ...]`` of the samples of all nodes; None where the tower is on another node.
        inputs: what the output's backward must reach on every rank, because it exchanges messages.
    """

    rows: Tensor | None
    inputs: list[Tensor]


class _Averaged(torch.autograd.Function):
    """Forward: an empty tensor and the parameters. Backward: averages their gradients over the ranks, in one message.

    Every rank must use the empty tensor, so that every rank takes part. A parameter that no rank uses gets no gradient,
    as in the unsharded model.
    """

    @staticmethod
    def forward(ctx: Any, env: ShardingEnv, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.env, ctx.like = env, [(p.shape, p.dtype) for p in parameters]
        ctx.device = parameters[0].device
        return parameters[0].new_empty(0), *(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(grads)
        used = torch.tensor([float(grad is not None) for grad in grads], device=ctx.device)
        parts = [
            torch.zeros(prod(shape), dtype=dtype, device=ctx.device) if grad is None else grad.to_dense().flatten()
            for grad, (shape, dtype) in zip(grads, ctx.like, strict=True)
        ]
        flat = all_reduce(torch.cat([used, *parts]), ctx.env, "towers/dense").div_(ctx.env.world_size)
        whether = flat[:count].tolist()
        sizes = [prod(shape) for shape, _ in ctx.like]
        return None, *(
            part.view(shape).to(dtype) if any_rank else None
            for any_rank, part, (shape, dtype) in zip(whether, flat[count:].split(sizes), ctx.like, strict=True)
        )


class Towers(nn.Module):
    """Base of one tower and of several: the stages of a batch.

    Attributes:
        dense_env: the ranks that have copies of the interactions.
    """

    dense_env: ShardingEnv

    def __init__(self, dense_env: ShardingEnv) -> None:
        super().__init__()
        self.dense_env = dense_env

    @property
    def parts(self) -> list[ShardedEmbeddingTower]:
        """The towers, in the order of the unsharded module."""
        raise NotImplementedError

    @property
    def env(self) -> ShardingEnv:
        """The ranks of the tables."""
        return self.parts[0].embedding.env

    def unsharded(self) -> nn.Module:
        """The unsharded module around the same collections and interactions. Nothing is copied."""
        raise NotImplementedError

    def _batches(self, features: Any, weighted_features: Any) -> list[Any]:
        """The batch of each tower."""
        raise NotImplementedError

    def _joined(self, outputs: list[Tensor]) -> Tensor:
        """The output of the forward."""
        raise NotImplementedError

    # ---- the stages of a forward, under TorchRec's names ----

    def create_context(self) -> TowerContext:
        """What the stages of one batch share. Pass it to each of them."""
        return TowerContext()

    def input_dist(
        self,
        ctx: TowerContext,
        features: KeyedJaggedTensor | None = None,
        weighted_features: KeyedJaggedTensor | None = None,
    ) -> Awaitable[Awaitable[list[KeyedJaggedTensor]]]:
        """Sends the sizes of the local batch to the nodes of the towers. Collective.

        Returns:
            Waiting for it sends the ids. Waiting for that result returns the argument of `compute`: the batch of each
            tower, empty where the tower is on another node.

        Raises:
            ValueError: a batch that a tower cannot read, on all ranks, at the first wait.
        """
        batches, env = self._batches(features, weighted_features), self.env
        if env.local_world_size == env.world_size:
            return NoWait(NoWait(batches))
        send = send_batches([tower.destination for tower in self.parts], batches, env, self._host_env)

        def arrived(wait: Any) -> list[KeyedJaggedTensor]:
            found, ctx.batch_sizes = wait()
            own: list[KeyedJaggedTensor] = found
            return own

        def sent() -> Awaitable[list[KeyedJaggedTensor]]:
            wait = send()
            return Later(lambda: arrived(wait))

        return Later(sent)

    def compute(self, ctx: TowerContext, dist_input: Sequence[KeyedJaggedTensor]) -> list[TowerRows]:
        """Looks up the ids of each tower, and runs the interactions of the towers on this node."""
        pending = [tower.embedding(batch) for tower, batch in zip(self.parts, dist_input, strict=True)]
        found: list[TowerRows] = []
        try:
            for tower, looked_up, batch in zip(self.parts, pending, dist_input, strict=True):
                found.append(tower._interact(looked_up, batch, self.dense_env))
        except Exception as error:
            if self.env.pg is None:
                raise
            ctx.error = error
        return found

    def output_dist(self, ctx: TowerContext, output: list[TowerRows]) -> TowerLazyAwaitable:
        """Sends the towers' outputs to the ranks of their samples. Collective.

        Returns:
            Waiting for it returns the output of the forward.

        Raises:
            Exception: an interaction failed. All ranks raise its error, which names the rank.
        """
        env = self.env
        if env.local_world_size == env.world_size:
            if ctx.error is not None:
                raise ctx.error
            outputs = [own.rows for own in output if own.rows is not None]
        else:
            outputs = self._returned(ctx, output)
        if self.training and env.pg is not None:
            for tower in self.parts:
                tower._share_buffers()
        return TowerLazyAwaitable(NoWait(self._joined(outputs)))

    def compute_and_output_dist(self, ctx: TowerContext, input: Sequence[KeyedJaggedTensor]) -> TowerLazyAwaitable:
        """`compute`, then `output_dist`."""
        return self.output_dist(ctx, self.compute(ctx, input))

    def _run(self, *batches: KeyedJaggedTensor | None) -> TowerLazyAwaitable:
        """All stages."""
        ctx = self.create_context()
        return self.output_dist(ctx, self.compute(ctx, self.input_dist(ctx, *batches).wait().wait()))

    def _returned(self, ctx: TowerContext, output: list[TowerRows]) -> list[Tensor]:
        """The output of each tower for the local batch ``[B, ...]``."""
        env, sizes = self.env, ctx.batch_sizes
        peers, nodes = peers_of(env), [tower.node for tower in self.parts]
        forms = exchange_forms([own.rows for own in output], ctx.error, [peers[n] for n in nodes], env, self._host_env)
        dtype = reduce(torch.promote_types, (own for _, own in forms))
        of_node: list[list[int]] = [[] for _ in peers]  # widths of the outputs of a node's towers
        for node, (shape, _) in zip(nodes, forms, strict=True):
            of_node[node].append(prod(shape))
        sends, receives = [0] * env.world_size, [0] * env.world_size
        for node, peer in enumerate(peers):
            sends[peer] = sizes[peer] * sum(of_node[env.node])
            receives[peer] = sizes[env.rank] * sum(of_node[node])
        here = [r.reshape(len(r), prod(r.shape[1:])).to(dtype) for own in output if (r := own.rows) is not None]
        message = torch.cat(here, 1).flatten() if here else torch.empty(0, dtype=dtype, device=self._device)
        ends = [part.flatten()[:0].to(dtype) for own in output for part in own.inputs]
        flat: Tensor = ToSources.apply(torch.cat([message, *ends]), env, sends, receives)
        batch = sizes[env.rank]
        parts = flat.split([batch * sum(widths) for widths in of_node])
        columns = [iter(own.view(batch, sum(w)).split(w, 1)) for own, w in zip(parts, of_node, strict=True)]
        return [
            next(columns[node]).reshape(batch, *shape).to(own) for node, (shape, own) in zip(nodes, forms, strict=True)
        ]

    @property
    def _host_env(self) -> ShardingEnv:
        return self.parts[0].embedding.executor.input_dist.host_env

    @property
    def _device(self) -> torch.device:
        return self.parts[0].embedding.device

    # ---- state ----

    def start(self) -> None:
        """Gives all ranks rank 0's interactions. Collective."""
        with torch.no_grad():
            for tower in self.parts:
                for tensor in (*tower.interaction.parameters(), *tower.interaction.buffers()):
                    broadcast(tensor, self.dense_env, "towers/start")

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """Learning rates and states of the tables, for towers without `DistributedModelParallel`."""
        return CombinedOptimizer(
            [(path, part.fused_optimizer) for path, part in self.named_modules() if isinstance(part, ShardedCollection)]
        )

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of the parameters that the towers keep equal or sharded: no other module may average them.

        Args:
            prefix: before each name, with a dot between.
        """
        before = f"{prefix}." if prefix else ""
        for path, part in self.named_modules():
            if isinstance(part, ShardedEmbeddingTower):
                inner = f"{before}{path}." if path else before
                yield from part.embedding.sharded_parameter_names(f"{inner}embedding")
                yield from (f"{inner}interaction.{name}" for name, _ in part.interaction.named_parameters())


class ShardedEmbeddingTower(Towers):
    """A sharded `EmbeddingTower`, with the same state dict names. `EmbeddingTowerSharder` makes it.

    Args:
        embedding: the sharded collection. All its shards are on one node.
        interaction: the unsharded interaction.
        dense_env: the ranks that have copies of the interaction.

    Raises:
        PlanError: shards on several nodes.
    """

    def __init__(self, embedding: ShardedCollection, interaction: nn.Module, dense_env: ShardingEnv) -> None:
        super().__init__(dense_env)
        embedding.on_one_node = True
        self._node = (embedding.shardings, node_of(embedding.shardings, embedding.env))
        self.embedding: ShardedCollection = embedding
        self.interaction = interaction
        features = dict.fromkeys(name for table in embedding.tables for name in table.feature_names)
        wide = any(table.data_type is DataType.FP64 for table in embedding.tables)
        dtype = torch.float64 if wide else torch.float32
        self._reads = tuple(features), dtype if embedding.is_weighted() else None

    @property
    def parts(self) -> list[ShardedEmbeddingTower]:
        return [self]

    @property
    def node(self) -> int:
        """The node of the tables, as of the current plan."""
        shardings = self.embedding.shardings
        if self._node[0] is not shardings:
            self._node = (shardings, node_of(shardings, self.embedding.env))
        return self._node[1]

    @property
    def destination(self) -> Destination:
        """Where the tower's features go."""
        return Destination(*self._reads, self.node)

    @eager
    def forward(self, features: KeyedJaggedTensor, optional_features: KeyedJaggedTensor | None = None) -> Tensor:
        """The local batch -> output of the interaction ``[B, ...]``.

        Raises:
            ValueError: a second batch, which no sharded collection reads.
        """
        return self._run(features, optional_features).wait()

    def _batches(self, features: Any, weighted_features: Any) -> list[Any]:
        if weighted_features is not None:
            raise ValueError(
                f"a tower over a {type(self.embedding).__name__} reads one batch, got two. Fix: pass one, or use an "
                f"EmbeddingTowerCollection, whose towers may read different batches"
            )
        return [features]

    def unsharded(self) -> EmbeddingTower:
        return EmbeddingTower(self.embedding, self.interaction)

    def _joined(self, outputs: list[Tensor]) -> Tensor:
        return outputs[0]

    def _interact(self, looked_up: Any, batch: Any, dense_env: ShardingEnv) -> TowerRows:
        """The interaction of looked-up rows, where the tower is on this node."""
        learned = {name: p for name, p in self.interaction.named_parameters() if p.requires_grad}
        averaged: dict[str, Tensor] = {}
        inputs: list[Tensor] = []
        if learned and torch.is_grad_enabled() and dense_env.pg is not None:
            token, *views = _Averaged.apply(dense_env, *learned.values())
            averaged, inputs = dict(zip(learned, views, strict=True)), [token]
        rows = None
        if self.embedding.env.node == self.node:
            rows = call_with(self.interaction, averaged, looked_up) if averaged else self.interaction(looked_up)
            if not isinstance(rows, Tensor) or not rows.dim() or rows.shape[0] != batch.stride():
                raise ValueError(
                    f"the interaction {type(self.interaction).__name__} returned {_described(rows)} for "
                    f"{batch.stride()} samples. Fix: return one tensor [B, ...]"
                )
            if inputs and self.embedding.env.local_world_size == self.embedding.env.world_size:  # nothing is exchanged
                rows = torch.cat([rows.flatten(), inputs[0].to(rows.dtype)]).view(rows.shape)
        inputs += [leaf for leaf in tree_leaves(looked_up) if isinstance(leaf, Tensor) and leaf.requires_grad]
        return TowerRows(rows, inputs)

    def _share_buffers(self) -> None:
        """Gives all ranks the interaction's buffers of the first rank on the tower's node. Collective."""
        env = self.embedding.env
        with torch.no_grad():
            for buffer in self.interaction.buffers():
                broadcast(buffer, env, "towers/buffers", self.node * env.local_world_size)


class ShardedEmbeddingTowerCollection(Towers):
    """A sharded `EmbeddingTowerCollection`, with the same state dict names. Its sharder makes it.

    The outputs are in the order of the unsharded towers under every plan.

    Args:
        towers: the sharded towers.
        dense_env: the ranks that have copies of the interactions.
    """

    def __init__(self, towers: Sequence[ShardedEmbeddingTower], dense_env: ShardingEnv) -> None:
        super().__init__(dense_env)
        self.towers = nn.ModuleList(towers)
        self._input_params = [tower_input_params(tower.embedding) for tower in towers]

    @property
    def parts(self) -> list[ShardedEmbeddingTower]:
        return list(self.towers)  # type: ignore[arg-type]

    @eager
    def forward(
        self, features: KeyedJaggedTensor | None = None, weighted_features: KeyedJaggedTensor | None = None
    ) -> Tensor:
        """The local batches of ids -> the towers' outputs side by side ``[B, ...]``.

        Raises:
            ValueError: a tower needs a batch that was not passed.
        """
        return self._run(features, weighted_features).wait()

    def _batches(self, features: Any, weighted_features: Any) -> list[Any]:
        batches = [weighted_features if weighted else features for _, weighted in self._input_params]
        for number, (batch, (_, weighted)) in enumerate(zip(batches, self._input_params, strict=True)):
            if batch is None:
                name = "weighted_features" if weighted else "features"
                raise ValueError(f"tower {number} needs {name}, which is None. Fix: pass {name}=")
        return batches

    def unsharded(self) -> EmbeddingTowerCollection:
        return EmbeddingTowerCollection([tower.unsharded() for tower in self.parts])

    def _joined(self, outputs: list[Tensor]) -> Tensor:
        return torch.cat(outputs, dim=1)


def _described(value: Any) -> str:
    return f"a tensor {list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
