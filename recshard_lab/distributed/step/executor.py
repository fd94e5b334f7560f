"""The one executor: it runs any tiling.

::

    features (local batch, KJT)
      -> input_dist      ids to the ranks whose rectangles cover them                  two messages: sizes, ids
      -> lookup          one kernel call for each kind of rectangle on this rank
      -> output_dist     rows local_batch, row stripes added, column pieces joined            one message
      -> output (local batch)
    backward the same way reversed; the optimizer steps inside the kernels             one message

Names used below: ``lookup_input`` are the ids that came to this rank, ``exchanged`` lanes travel, ``replicated`` lanes
(data parallel) look their own batch up at home and learn from everybody's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.comm import Registry, ShardingEnv
from recshard_lab.distributed.step.input_dist import InputDist, LookupInput, PendingInput
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.lookup import Bags, GroupKind, KernelGroup, RankLookup
from recshard_lab.distributed.step.output_dist import PooledOutput, SequenceOutput, VariableOutput
from recshard_lab.distributed.step.row_norms import RowNormExchange
from recshard_lab.distributed.step.weight_gradients import exchange_output, of_replicas
from recshard_lab.embedding.out_of_range import OutOfRange
from recshard_lab.sparse import KeyedJaggedTensor

Listener = Callable[[KernelGroup, Tensor, list[int]], None]


@dataclass(slots=True)
class _Saved:
    """What backward needs: the ids, and what each exchanged kernel kept."""

    lookup_input: LookupInput
    kept: list[Any]


@dataclass(slots=True, frozen=True)
class Rows:
    """Rows that were looked up and are still to travel: of each exchanged kernel, of each replicated one."""

    exchanged: list[Tensor]
    replicated: list[Tensor]
    saved: _Saved | None


@dataclass(slots=True, frozen=True)
class OutputPaths:
    """How rows come home over some connections: batches of one size, and variable ones."""

    route: PooledOutput | SequenceOutput
    variable: VariableOutput


class Executor:
    """Runs a collection's tables under one tiling.

    Args:
        layout: the wiring.
        kinds: kernel kinds, as numbered in the layout's groups.
        env: the ranks.
        device: where the rectangles live.
        pooled: False for sequence collections.
        weighted: whether batches carry per-sample weights.
        codecs: number formats of rows and gradients on the wire; FP32 when left out.
        policy: what becomes of ids that are no rows; refused when left out.
    """

    def __init__(
        self,
        layout: Layout,
        kinds: list[GroupKind],
        env: ShardingEnv,
        device: torch.device,
        *,
        pooled: bool,
        weighted: bool,
        codecs: Registry | None = None,
        policy: OutOfRange | None = None,
    ) -> None:
        self.layout, self.env, self.device, self.pooled, self.codecs = layout, env, device, pooled, codecs
        self.input_dist = InputDist(layout, env, pooled=pooled, weighted=weighted, policy=policy)
        self.lookup = RankLookup(layout, kinds, env.rank, pooled, device)
        self.route = PooledOutput(layout, env, codecs) if pooled else SequenceOutput(layout, env, codecs)
        self.variable = VariableOutput(layout, env, codecs)
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        #: for each kind whose column shards must add their squares: the group here, if any, how often, the exchange
        self.row_norms: list[tuple[KernelGroup | None, int, RowNormExchange]] = []
        for kind in kinds:
            if kind.optimizer is not None and kind.exchanges_row_norms:
                here = next((group for group in self.lookup.exchanged if group.kind == kind), None)
                exchange = RowNormExchange(layout, env, here.shards if here else [], device)
                self.row_norms.append((here, kind.optimizer.row_norm_rounds, exchange))
        #: parameters of tables on the dense kernel, each beside the kernel's own view of the same memory
        self.dense: list[tuple[nn.Parameter, Tensor]] = []
        self.buffer_bytes = {"input_buffers": 0, "output_buffers": 0}
        self._moved_away = False
        #: told of every lookup, before it: the group, its ids ``[N]`` lane after lane, ids of each lane
        self.listener: Listener | None = None

    def retire(self) -> None:
        """The tables lie elsewhere from now on: nothing started here may end here."""
        self._moved_away = True

    def start(self, features: KeyedJaggedTensor) -> PendingInput:
        """Sends the local batch on its way; several batches may be under way."""
        return self.input_dist.start(features)

    def finish(self, lookup_input: LookupInput) -> Tensor:
        """Looks up what came and brings the rows home, with a gradient when gradients are on.

        Raises:
            ValueError: the batch was sent before the tables moved.
        """
        if self._moved_away or lookup_input.local_batch.layout is not self.layout:
            raise ValueError(
                "the tables have moved (dmp.reshard) since this batch was sent: its ids went where their rows no "
                "longer are. Fix: finish every lookup before dmp.reshard, or send the batch again"
            )
        if lookup_input.looked_up is not None:
            if lookup_input.local_batch.weights is not None:
                raise ValueError(
                    "per-sample weights that ask for a gradient cannot be looked up ahead of the forward that makes "
                    "them: use TrainPipelineSparseDist, or detach the weights"
                )
            out = lookup_input.looked_up
        elif torch.is_grad_enabled():
            out = _Lookup.apply(self.anchor, lookup_input.local_batch.weights, self, lookup_input)
        else:
            out = self.forward(lookup_input, training=False)[0]
        return out if lookup_input.bags is None else self._to_samples(out, lookup_input)

    def _to_samples(self, flat: Tensor, lookup_input: LookupInput) -> Tensor:
        """Of a variable batch, ``[B, output width]``; of one that only met a variable batch elsewhere too."""
        if lookup_input.local_batch.inverse is not None:
            return self.variable.to_samples(flat, lookup_input.local_batch)
        batch, dims = lookup_input.local_batch.batch_size, [block.dim for block in self.layout.blocks]
        parts = flat.split([batch * dim for dim in dims])
        return torch.cat([part.view(batch, dim) for part, dim in zip(parts, dims, strict=True)], 1)

    def output_paths(self, env: ShardingEnv) -> OutputPaths:
        """The ways home over other connections between the same ranks."""
        return OutputPaths(
            (PooledOutput if self.pooled else SequenceOutput)(self.layout, env, self.codecs),
            VariableOutput(self.layout, env, self.codecs),
        )

    def read(self, lookup_input: LookupInput, training: bool) -> Rows:
        """The rows of what came, still where they were looked up: from here on the tables may be stepped."""
        kept, exchanged, replicated = [], [], []
        for group in self.lookup.exchanged:
            bags = group.bags(lookup_input)
            if self.listener is not None:
                self.listener(group, bags[0], bags[3])
            rows, saved = self._run(group, bags, training)
            exchanged.append(rows)
            kept.append(saved)
        for group in self.lookup.replicated:
            bags = group.own_bags(lookup_input.local_batch)
            if self.listener is not None:
                self.listener(group, bags[0], bags[3])
            replicated.append(self._run(group, bags, False)[0])
        return Rows(exchanged, replicated, _Saved(lookup_input, kept) if training else None)

    @torch.no_grad()
    def exchange_output(self, rows: Rows, lookup_input: LookupInput, output_paths: OutputPaths | None = None) -> Tensor:
        """What `read` gave as the rows of the local batch, over these output_paths or the collection's own."""
        output_paths = output_paths or OutputPaths(self.route, self.variable)
        route = output_paths.route if lookup_input.bags is None else output_paths.variable
        pending = route.begin(rows.exchanged, rows.replicated, lookup_input)
        out = route.finish(pending)
        self._measure(lookup_input, out, pending.buffer_bytes)
        return out

    def forward(self, lookup_input: LookupInput, training: bool) -> tuple[Tensor, _Saved | None]:
        """Rows of the local batch, and what ``backward`` needs."""
        rows = self.read(lookup_input, training)
        return self.exchange_output(rows, lookup_input), rows.saved

    def backward(self, saved: _Saved, grad: Tensor) -> Tensor | None:
        """Brings gradients to the rectangles and steps their optimizers.

        Gradients are averaged over ranks, as DistributedDataParallel does for the dense part.

        Returns:
            The gradient of this rank's per-sample weights, of its own loss, where they ask for it.

        Raises:
            ValueError: the tables have moved since the batch was looked up.
        """
        if self._moved_away:
            raise ValueError(
                "the tables have moved (dmp.reshard) since this batch was looked up: its gradients would step the "
                "rows that were left behind. Fix: call backward before dmp.reshard"
            )
        for parameter, weight in self.dense:  # zero_grad may have come since
            weight.grad = parameter.grad
        lookup_input = saved.lookup_input
        copies = of_replicas(self.lookup, self.layout, grad, lookup_input)
        route = self.route if lookup_input.bags is None else self.variable
        pending = route.begin_backward(grad, 1.0 / self.env.world_size, lookup_input)
        grads = route.finish_backward(pending)
        backward_bytes = grad.numel() * grad.element_size() + pending.buffer_bytes
        self.buffer_bytes["output_buffers"] = max(self.buffer_bytes["output_buffers"], backward_bytes)
        waiting: dict[int, tuple[Any, Tensor]] = {}
        weights: dict[int, Tensor | None] = {}
        for group, kept in zip(self.lookup.exchanged, saved.kept, strict=True):
            own = grads.take(self._width(group, lookup_input))
            if kept is None:
                kept, own = group.remember(group.no_ids(lookup_input)), own.new_zeros(1, group.width)
            if group.kind.exchanges_row_norms:
                waiting[id(group)] = (kept, own)
            else:
                weights[id(group)] = group.backward(kept, own)
        for group in self.lookup.replicated:
            own, bags = grads.take(self._width(group, lookup_input)), group.bags(lookup_input)
            if self.pooled and own.shape[0] == 0:
                own, bags = own.new_zeros(1, group.width), group.no_ids(lookup_input)
            group.backward(group.remember(bags), own)
        for here, rounds, exchange in self.row_norms:  # every rank takes part in each, in the same order
            kept, own = waiting.get(id(here), (None, grad))
            if here is not None and kept is not None:
                weights[id(here)] = here.backward(kept, own, exchange)
            else:
                exchange.nothing(grad, rounds)
        for parameter, weight in self.dense:
            parameter.grad = weight.grad
        of_kernels = [weights[id(group)] for group in self.lookup.exchanged]
        return exchange_output(
            [own for own in of_kernels if own is not None], copies, lookup_input, self.layout, self.env
        )

    def _run(self, group: KernelGroup, bags: Bags, training: bool) -> tuple[Tensor, Any]:
        """A kernel's rows; kernels are spared batches without a bag."""
        if self.pooled and bags[1].numel() == 1:
            return torch.zeros(0, group.width, device=self.device), None
        return group.forward(bags, training)

    def _width(self, group: KernelGroup, lookup_input: LookupInput) -> int:
        if self.pooled:
            return group.width
        lanes = enumerate(group.lanes, group.first_lane)
        return sum(sum(lookup_input.counts[number]) * lane.shard.num_cols for number, lane in lanes)

    def _measure(self, lookup_input: LookupInput, out: Tensor, route_bytes: int) -> None:
        held = [
            lookup_input.ids,
            lookup_input.lengths,
            lookup_input.copies,
            *([] if lookup_input.weights is None else [lookup_input.weights]),
        ]
        self.buffer_bytes["input_buffers"] = sum(t.numel() * t.element_size() for t in held)
        self.buffer_bytes["output_buffers"] = out.numel() * out.element_size() + route_bytes


class _Lookup(torch.autograd.Function):
    """forward: rows of the local batch; backward: gradients to their rectangles, optimizers stepped there."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, weights: Tensor | None, executor: Executor, lookup_input: LookupInput
    ) -> Tensor:
        out, ctx.saved = executor.forward(lookup_input, training=True)
        ctx.executor = executor
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None]:
        if ctx.saved is None:
            raise RuntimeError(
                "backward ran twice through one sharded lookup: the first run has stepped the tables. "
                "Fix: call the model again before the second backward"
            )
        saved, ctx.saved = ctx.saved, None
        return None, ctx.executor.backward(saved, grad), None, None
