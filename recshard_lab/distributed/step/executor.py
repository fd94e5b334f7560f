"""The one executor: it runs any tiling.

The output exchange is issued when a collection is called and waited for when its output is first used. Backward issues
the gradient exchange when it reaches the output and waits for it when it reaches the call. What the model computes in
between runs while the messages travel.

::

    features (local batch, KJT)
      -> input_dist      ids to the ranks whose shards store their rows                two messages: sizes, ids
      -> lookup          one kernel call for each kind of shard on this rank
      -> output_dist     rows to their source ranks; row shards added, columns joined  one message
      -> output (local batch)
    backward in reverse; the optimizers step inside the kernels                        one message

``exchanged`` shard features send rows to other ranks. ``replicated`` ones (data parallel) look up the local batch only
and apply the gradients of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.comm import (
    Failed,
    RankLost,
    Registry,
    ShardingEnv,
    complete,
    failing_rank,
    raise_after_backward,
)
from recshard_lab.distributed.awaitable import NoWait
from recshard_lab.distributed.step.batch import LookupInput
from recshard_lab.distributed.step.gradients import (
    Deferred,
    KernelGradients,
    RowNormExchange,
    exchange_weight_gradients,
    of_replicas,
)
from recshard_lab.distributed.step.input_dist import InputDist, PendingInput
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.lookup import GroupKind, RankLookup, ShardLookup
from recshard_lab.distributed.step.messages import Columns, LocalOutput, OutputExchange, PendingOutput, is_enough
from recshard_lab.distributed.step.output_dist import PooledOutput, SequenceOutput
from recshard_lab.embedding.inputs import OutOfRange
from recshard_lab.embedding.kernels import KernelInput
from recshard_lab.embedding.managed_collision.kernel import ManagedKernel
from recshard_lab.embedding.scaled_loss import StepsInBackward, watch, watch_scalers
from recshard_lab.sparse import KeyedJaggedTensor

Listener = Callable[[ShardLookup, Tensor, list[int]], None]
Recorder = Callable[[str, Any], None]
"""Called with each stage's name and what it hands to the next one, see `Executor.record`."""


@dataclass(slots=True, eq=False)
class _Saved(StepsInBackward):
    """What backward needs: the ids, what each exchanged kernel kept, and the gradient exchange once it is issued.

    After an error, of this rank or of another one, backward takes part in the messages and steps nothing.
    """

    lookup_input: LookupInput
    kept: list[Any]
    grad: Tensor = field(init=False)
    copies: dict[int, Tensor] = field(init=False)
    path: OutputExchange | None = None
    pending: PendingOutput = field(init=False)
    failed: Exception | None = None
    table: str = ""


@dataclass(slots=True, frozen=True)
class Rows:
    """Looked-up rows before the output exchange: of each exchanged and of each replicated kernel.

    After an error of the lookup they are zeros.
    """

    exchanged: list[Tensor]
    replicated: list[Tensor]
    saved: _Saved | None
    error: Exception | None = None


@dataclass(slots=True)
class IssuedOutput:
    """An output exchange that was issued.

    Attributes:
        path: the exchange.
        pending: what it has under way.
        saved: what backward needs.
        failed: an earlier part of the step.
    """

    path: OutputExchange
    pending: PendingOutput
    saved: _Saved | None
    failed: Failed | None


@dataclass(slots=True, frozen=True)
class OutputPaths:
    """The output exchanges over one set of connections: for batches of one size, and for variable ones."""

    route: PooledOutput | SequenceOutput
    variable: PooledOutput


class Executor:
    """Runs a collection's tables under one tiling.

    Args:
        layout: which rank stores and looks up which shards.
        kinds: kernel kinds, as numbered in the layout's groups.
        env: the ranks.
        device: of the shards.
        pooled: False for sequence collections.
        weighted: whether batches carry per-sample weights.
        codecs: number formats of rows and gradients on the wire; FP32 when left out.
        policy: for ids out of range; ``"error"`` when left out.
        distinct: whether a sequence collection sends each distinct id of a shard feature once.
        output_dtype: format of outputs and their gradients; that of rows when left out.
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
        distinct: bool = False,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        self.layout, self.env, self.device, self.pooled, self.codecs = layout, env, device, pooled, codecs
        self.input_dist = InputDist(layout, env, pooled=pooled, weighted=weighted, policy=policy, distinct=distinct)
        self.output_dtype = output_dtype or layout.rows_dtype
        self.lookup = RankLookup(layout, kinds, env.rank, pooled, device)
        self.paths = self.output_paths(env)
        self.local = LocalOutput() if is_enough(layout, len(self.lookup.groups)) else None
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        #: for each kind whose column shards add their squares: this rank's group, if any, rounds a step, the exchange
        self.row_norms: list[tuple[ShardLookup | None, int, RowNormExchange]] = []
        for kind in kinds:
            if kind.optimizer is not None and kind.joins_norms:
                here = next((group for group in self.lookup.exchanged if group.kind == kind), None)
                exchange = RowNormExchange(layout, env, here.shards if here else [], device)
                self.row_norms.append((here, kind.optimizer.row_norm_rounds, exchange))
        #: parameters of tables on the dense kernel, each with the kernel's view of the same memory
        self.dense: list[tuple[nn.Parameter, Tensor]] = []
        #: names of tables and their parameters on this rank, for `_frozen`
        self.parameters: list[tuple[str, nn.Parameter]] = []
        #: gradients that wait for `step_deferred`; None where fused tables step in backward
        self.deferred: Deferred | None = None
        self.buffer_bytes = {"input_buffers": 0, "output_buffers": 0}
        self._moved_away = False
        #: name of a table that a kernel steps; None if torch optimizers step all of them
        self.stepped: str | None = None
        watch_scalers()
        #: called before every lookup with the group, its ids ``[N]`` by shard feature, and their number in each
        self.listener: Listener | None = None
        self._recorder: Recorder | None = None

    def record(self, recorder: Recorder | None) -> None:
        """Calls ``recorder`` with what each stage of the coming steps hands to the next one; None ends it.

        ::

            "batch"         the local `KeyedJaggedTensor`, before anything else
            "sent"          `Packed`: the ids for each rank. Not on one rank, where nothing is packed
            "arrived"       `LookupInput`: the ids to look up here
            "rows"          `Rows`, before the output exchange
            "output"        ``[B, output width]`` of the local batch
            "grad"          its gradient, before the gradient exchange
            "kernel_grads"  `KernelGradients` of one kernel, before it steps; once for each kernel
            "stepped"       None: all kernels have stepped

        The recorder must copy what it keeps: later stages write into some of these tensors.
        """
        self._recorder = self.input_dist.recorder = recorder

    def retire(self) -> None:
        """Marks this executor stale after resharding. In-flight batches raise."""
        self._moved_away = True

    def start(self, features: KeyedJaggedTensor) -> PendingInput | NoWait[LookupInput]:
        """Sends the local batch. Several batches may be in flight."""
        return self.announce(features)()

    def announce(self, features: KeyedJaggedTensor) -> Callable[[], PendingInput | NoWait[LookupInput]]:
        """Sends the sizes of the local batch, see `InputDist.announce`."""
        if self._recorder is not None:
            self._recorder("batch", features)
        if torch.is_grad_enabled() and (frozen := self._frozen()) is not None:
            if self.env.world_size == 1:
                raise frozen
            self.input_dist.error = self.input_dist.error or frozen
        return self.input_dist.announce(features)

    def _frozen(self) -> ValueError | None:
        """The error for a frozen table in a forward that records gradients; None if all tables learn."""
        for name, parameter in self.parameters:
            if not parameter.requires_grad:
                return ValueError(
                    f"table {name!r} has requires_grad=False, and the forward records gradients: backward would step "
                    f"the table. Fix: call a frozen model under torch.no_grad(), or train the table with a learning "
                    f"rate of 0"
                )
        return None

    def begin(self, lookup_input: LookupInput) -> PendingRows:
        """Looks up remote ids and issues the output exchange. ``wait()`` returns the rows of the local batch.

        With gradients on, ``wait()`` returns a tensor whose backward steps the tables.

        Raises:
            ValueError: the batch was sent before the tables moved.
        """
        pending = self._pending(lookup_input)
        pending.issue()
        return pending

    def compute(self, lookup_input: LookupInput) -> PendingRows:
        """Looks up remote ids. ``issue()`` issues the output exchange, and ``wait()`` returns as that of `begin`.

        Raises:
            ValueError: the batch was sent before the tables moved.
        """
        pending = self._pending(lookup_input)
        pending.look_up()
        return pending

    def _pending(self, lookup_input: LookupInput) -> PendingRows:
        if self._moved_away or lookup_input.local_batch.layout is not self.layout:
            raise ValueError(
                "the tables have moved (dmp.reshard) since this batch was sent: its ids went where their rows no "
                "longer are. Fix: finish every lookup before dmp.reshard, or send the batch again"
            )
        if self.deferred is not None and lookup_input.weight_gradients is not None:
            raise ValueError(
                "per-sample weights require a gradient, and the steps of the tables are deferred "
                "(fused_optimizer.defer_steps, GradientClippingOptimizer): kernels compute that gradient when they "
                "step. Fix: detach the weights, or let the tables step in backward"
            )
        pending = PendingRows(self, lookup_input)
        if lookup_input.looked_up is not None:
            if lookup_input.local_batch.weights is not None:
                raise ValueError(
                    "per-sample weights that require a gradient cannot be looked up ahead of the forward that makes "
                    "them. Fix: use TrainPipelineSparseDist, or detach the weights"
                )
            pending.rows = lookup_input.looked_up
        return pending

    @property
    def prefetches(self) -> bool:
        """Whether `prefetch` does anything: a kernel here has a slow tier."""
        return any(group.prefetches for group in self.lookup.exchanged)

    @torch.no_grad()
    def prefetch(self, lookup_input: LookupInput) -> None:
        """Moves the rows of a batch into the fast memory of its kernels, before `begin`. May run in another thread.

        An error is raised by the lookup of the batch.
        """
        if self._moved_away or lookup_input.local_batch.layout is not self.layout or lookup_input.error is not None:
            return
        try:
            bags = [(group, group.bags(lookup_input)) for group in self.lookup.exchanged]
            lookup_input.prefetched = [
                None if group.kernel.pooled and own[1].numel() == 1 else group.prefetch(own) for group, own in bags
            ]
        except Exception as error:
            lookup_input.error = error

    def _to_samples(self, flat: Tensor, lookup_input: LookupInput) -> Tensor:
        """``[B, output width]`` of a variable batch, or of a batch that is variable on another rank."""
        local_batch, dims = lookup_input.local_batch, [block.dim for block in self.layout.blocks]
        sizes = [lengths.numel() * dim for lengths, dim in zip(local_batch.lengths, dims, strict=True)]
        blocks = [part.view(-1, dim) for part, dim in zip(flat.split(sizes), dims, strict=True)]
        if local_batch.inverse is not None:
            blocks = [rows.index_select(0, bag) for rows, bag in zip(blocks, local_batch.inverse, strict=True)]
        return torch.cat(blocks, 1)

    def output_paths(self, env: ShardingEnv) -> OutputPaths:
        """Output exchanges over other connections between the same ranks."""
        return OutputPaths(
            (PooledOutput if self.pooled else SequenceOutput)(self.layout, env, self.codecs),
            PooledOutput(self.layout, env, self.codecs, variable=True),
        )

    def read(self, lookup_input: LookupInput, training: bool) -> Rows:
        """Looks up remote ids. When it returns, the tables may be stepped. `receive_output` raises its errors."""
        try:
            return self._read(lookup_input, training)
        except Exception as error:
            if self.env.pg is None:
                raise
            exchanged = [self._zeros(group, lookup_input) for group in self.lookup.exchanged]
            replicated = [self._zeros(group, lookup_input) for group in self.lookup.replicated]
            return Rows(exchanged, replicated, _Saved(lookup_input, []) if training else None, error)

    def _read(self, lookup_input: LookupInput, training: bool) -> Rows:
        if lookup_input.error is not None:
            raise lookup_input.error
        if training and (frozen := self._frozen()) is not None:  # the ids may have been sent ahead
            raise frozen
        if self._recorder is not None:
            self._recorder("arrived", lookup_input)
        kept, exchanged, replicated, found = [], [], [], list[Tensor]()
        prefetched, lookup_input.prefetched = lookup_input.prefetched or repeat(None), None
        for group, own in zip(self.lookup.exchanged, prefetched, strict=False):
            bags = group.bags(lookup_input)
            if self.listener is not None:
                self.listener(group, bags[0], bags[3])
            looked_up, kept_here = self._run(group, bags, training, own)
            exchanged.append(looked_up)
            kept.append(kept_here)
            if isinstance(group.kernel, ManagedKernel):
                found.append(group.kernel.rows if bags[0].numel() else bags[0])
        lookup_input.rows = torch.cat(found) if found else None
        for group in self.lookup.replicated:
            bags = group.own_bags(lookup_input.local_batch)
            if self.listener is not None:
                self.listener(group, bags[0], bags[3])
            replicated.append(self._run(group, bags, False)[0])
        saved = _Saved(lookup_input, kept, table=self.stepped or "") if training else None
        if saved is not None and self.stepped is not None:
            watch(saved)
        rows = Rows(exchanged, replicated, saved)
        if self._recorder is not None:
            self._recorder("rows", rows)
        return rows

    def _zeros(self, group: ShardLookup, lookup_input: LookupInput) -> Tensor:
        """Rows of a lookup that failed. They take no memory."""
        zero = torch.zeros((), dtype=self.layout.rows_dtype, device=self.device)
        if group.first_copy is not None:  # looks up the local batch
            replicas = lookup_input.local_batch.replicas[group.first - group.first_copy :][: len(group.features)]
            if self.pooled:
                return zero.expand(max(own.num_bags for own in replicas), group.width)
            pairs = zip(replicas, group.features, strict=True)
            return zero.expand(sum(own.num_ids * feature.shard.num_cols for own, feature in pairs))
        if group.kernel.pooled:
            return zero.expand(lookup_input.lengths.shape[1], group.width)
        return zero.expand(self._width(group, lookup_input))

    def issue_output(
        self, rows: Rows, lookup_input: LookupInput, output_paths: OutputPaths | None = None
    ) -> IssuedOutput:
        """Sends rows to the ranks of their samples, over these paths or the collection's."""
        path = self._path(lookup_input, output_paths or self.paths)
        pending: list[PendingOutput] = []

        def issue(exchanged: list[Tensor], replicated: list[Tensor]) -> None:
            pending[:] = [path.begin(exchanged, replicated, lookup_input)]

        failed = self._share(
            lambda: issue(rows.exchanged, rows.replicated),
            lambda: issue(
                [self._zeros(group, lookup_input) for group in self.lookup.exchanged],
                [self._zeros(group, lookup_input) for group in self.lookup.replicated],
            ),
            rows.error,
        )
        return IssuedOutput(path, pending[0], rows.saved, failed)

    def _share(
        self, part: Callable[[], object], rest: Callable[[], object], earlier: Exception | None = None
    ) -> Failed | None:
        """Runs a part of the step, see `complete`. Returns the error of the part, or of an earlier one."""
        try:
            complete(self.env, part, rest, earlier)
        except Failed as failed:
            own = failing_rank(failed.error) == self.env.world.rank
            self.input_dist.error = failed.error if own and not failed.known else None
            return failed
        return None

    def _path(self, lookup_input: LookupInput, paths: OutputPaths) -> OutputExchange:
        if lookup_input.bags is not None:
            return paths.variable
        return paths.route if self.local is None else self.local

    def receive_output(self, issued: IssuedOutput) -> Tensor:
        """Waits for what `issue_output` sent: the rows of the local batch.

        Raises:
            Exception: the lookup or the output exchange failed on a rank. Every rank raises it, and it names the rank.
                If other ranks do not know of it, this rank raises it after backward, so that they need not wait.
        """
        path, pending = issued.path, issued.pending
        received: list[Tensor] = []

        def finish() -> None:
            received.append(path.finish(pending).to(self.output_dtype))

        failed = self._share(finish, finish, issued.failed)
        if failed is not None:
            if failed.known or issued.saved is None:
                raise failed.error
            issued.saved.failed = failed  # other ranks wait for this one in backward
        self._measure(pending.lookup_input, received[-1], pending.buffer_bytes)
        if self._recorder is not None:
            self._recorder("output", received[-1])
        return received[-1]

    @torch.no_grad()
    def begin_backward(self, saved: _Saved, grad: Tensor) -> None:
        """Issues the gradient exchange of a batch. `finish_backward` must follow: it raises errors of both.

        Raises:
            ValueError: the tables have moved since the batch was looked up.
        """
        if self._moved_away:
            raise ValueError(
                "the tables have moved (dmp.reshard) since this batch was looked up: its gradients would step the "
                "rows that were left behind. Fix: call backward before dmp.reshard"
            )
        lookup_input, grad = saved.lookup_input, grad.to(self.layout.rows_dtype)
        if self._recorder is not None:
            self._recorder("grad", grad)
        path = self._path(lookup_input, self.paths)
        saved.grad, saved.path = grad, path

        def issue(gradient: Tensor) -> None:
            saved.pending = path.begin_backward(gradient, 1.0 / self.env.world_size, lookup_input)

        def begin() -> None:
            saved.copies = of_replicas(self.lookup, self.layout, grad, lookup_input)
            issue(grad)

        saved.failed = self._share(begin, lambda: issue(torch.zeros_like(grad)), saved.failed)

    @torch.no_grad()
    def finish_backward(self, saved: _Saved) -> Tensor | None:
        """Waits for the gradients and steps the tables' optimizers.

        Gradients are averaged over ranks, as DistributedDataParallel does for the dense part.

        Returns:
            The gradient of this rank's per-sample weights, of its own loss, where they require one.

        Raises:
            Exception: a part of backward failed on a rank. Every rank that receives a message after it raises it, and
                it names the rank. The other ranks raise it with their next batch.
        """
        weights: list[Tensor | None] = []
        failed = self._share(
            lambda: weights.append(self._finish_backward(saved)), lambda: self._take_part(saved), saved.failed
        )
        if failed is not None:
            raise failed.error
        return weights[0]

    def _take_part(self, saved: _Saved) -> None:
        """The messages of `_finish_backward`, with any numbers. Steps nothing."""
        lookup_input, grad = saved.lookup_input, saved.grad
        assert saved.path is not None
        saved.path.finish_backward(saved.pending)
        if self.deferred is None:
            self._send_row_norms({id(group): group.bags(lookup_input) for group in self.lookup.exchanged}, grad)
        of_kernels = [group.bags(lookup_input)[2] for group in self.lookup.exchanged]
        zeros = [torch.zeros_like(weights) for weights in of_kernels if weights is not None]
        copies = {n: grad.new_zeros(own.num_ids) for n, own in enumerate(lookup_input.local_batch.replicas)}
        exchange_weight_gradients(zeros, copies, lookup_input, self.layout, self.env)

    def _send_row_norms(self, bags: dict[int, KernelInput], like: Tensor) -> None:
        """Takes part in all exchanges of row norms with zeros. ``bags`` are those of each kernel."""
        for here, rounds, exchange in self.row_norms:
            if here is not None and id(here) in bags:
                here.send_row_norms(bags[id(here)], exchange)
            else:
                exchange.nothing(like, rounds)

    def _finish_backward(self, saved: _Saved) -> Tensor | None:
        for parameter, weight in self.dense:  # zero_grad may have been called since
            weight.grad = parameter.grad
        lookup_input, grad, pending = saved.lookup_input, saved.grad, saved.pending
        assert saved.path is not None
        grads = saved.path.finish_backward(pending)
        backward_bytes = grad.numel() * grad.element_size() + pending.buffer_bytes
        self.buffer_bytes["output_buffers"] = max(self.buffer_bytes["output_buffers"], backward_bytes)
        arrived = self._arrived(saved, grads)
        if self.deferred is not None:
            kernels = list(arrived)
            self.deferred.add([own for own in kernels if own.group.kind.optimizer is not None])
            arrived = iter([own for own in kernels if own.group.kind.optimizer is None])
        weights = self._backward_of_kernels(arrived, grad, row_norms=self.deferred is None)
        if self._recorder is not None:
            self._recorder("stepped", None)
        for parameter, weight in self.dense:
            parameter.grad = weight.grad
        of_kernels = [weights.get(id(group)) for group in self.lookup.exchanged]
        return exchange_weight_gradients(
            [own for own in of_kernels if own is not None], saved.copies, lookup_input, self.layout, self.env
        )

    def _arrived(self, saved: _Saved, grads: Columns) -> Iterator[KernelGradients]:
        """The gradients of each kernel, one kernel at a time, so that at most one copy is alive."""
        lookup_input = saved.lookup_input
        for group, kept in zip(
            self.lookup.groups, [*saved.kept, *repeat(None, len(self.lookup.replicated))], strict=True
        ):
            own = grads.take(self._width(group, lookup_input))
            own = own if group.kernel.pooled else own.reshape(-1)
            if kept is not None and self.deferred is None:
                bags = [] if group.on_step is None else [group.bags(lookup_input)]
                yield KernelGradients(group, bags, [own], kept)
            elif group.kernel.pooled and own.shape[0] == 0:
                yield KernelGradients(group, [group.no_ids(lookup_input)], [own.new_zeros(1, group.width)])
            else:
                yield KernelGradients(group, [group.bags(lookup_input)], [own], kept)

    def _backward_of_kernels(
        self, gradients: Iterable[KernelGradients], like: Tensor, row_norms: bool = True
    ) -> dict[int, Tensor | None]:
        """Steps kernels, or adds to ``.grad``. Returns the gradient of per-sample weights of each.

        Args:
            gradients: of the kernels.
            like: a tensor of the dtype and device of gradients.
            row_norms: whether the row norms of column shards are exchanged, on all ranks alike.
        """
        waiting: dict[int, KernelGradients] = {}
        weights: dict[int, Tensor | None] = {}
        for own in gradients:
            if own.group.kind.joins_norms:
                waiting[id(own.group)] = own
            else:
                weights[id(own.group)] = self._backward_of_kernel(own)
        for here, rounds, exchange in self.row_norms if row_norms else ():  # every rank takes part, in the same order
            if here is not None and id(here) in waiting:
                weights[id(here)] = self._backward_of_kernel(waiting[id(here)], exchange)
            else:
                exchange.nothing(like, rounds)
        return weights

    def _backward_of_kernel(self, gradients: KernelGradients, exchange: RowNormExchange | None = None) -> Tensor | None:
        group, kept = gradients.group, gradients.kept
        if self._recorder is not None:
            self._recorder("kernel_grads", gradients)
        if group.on_step is not None:
            for ids, _, _, counts, _ in gradients.bags:
                group.on_step(ids, counts)
        if kept is not None:
            return group.backward(kept, gradients.grads[0], exchange)
        bags, grad = gradients.merged()
        return group.backward(group.remember(bags), grad, exchange)

    @torch.no_grad()
    def step_deferred(self) -> None:
        """Steps the fused tables once, with the gradients of all batches since the last step. Collective.

        Raises:
            Exception: the step failed on a rank, before row norms were exchanged. Names the rank.
        """
        assert self.deferred is not None
        if not self.deferred.batches:
            return
        kernels, like = self.deferred.take(), self.anchor.detach()
        failed = self._share(
            lambda: self._backward_of_kernels(kernels, like),
            lambda: self._send_row_norms({id(own.group): own.merged()[0] for own in kernels}, like),
        )
        if failed is not None:
            raise failed.error

    def _run(self, group: ShardLookup, bags: KernelInput, training: bool, prefetched: Any = None) -> tuple[Tensor, Any]:
        """A kernel's rows. Kernels do not get batches without a bag."""
        if group.kernel.pooled and bags[1].numel() == 1:
            return torch.zeros(0, group.width, device=self.device), None
        return group.forward(bags, training, prefetched)

    def _width(self, group: ShardLookup, lookup_input: LookupInput) -> int:
        if group.kernel.pooled:
            return group.width
        features = enumerate(group.features, group.first)
        return sum(int(lookup_input.counts[number].sum()) * feature.shard.num_cols for number, feature in features)

    def _measure(self, lookup_input: LookupInput, out: Tensor, route_bytes: int) -> None:
        held = [
            lookup_input.ids,
            lookup_input.lengths,
            lookup_input.copies,
            *([] if lookup_input.weights is None else [lookup_input.weights]),
        ]
        self.buffer_bytes["input_buffers"] = sum(t.numel() * t.element_size() for t in held)
        self.buffer_bytes["output_buffers"] = out.numel() * out.element_size() + route_bytes


class PendingRows:
    """Rows on their way to the ranks of their samples.

    Args:
        executor: that looked them up.
        lookup_input: the batch.
    """

    def __init__(self, executor: Executor, lookup_input: LookupInput) -> None:
        self.executor, self.lookup_input = executor, lookup_input
        self.training = torch.is_grad_enabled()
        self.saved: _Saved | None = None
        self._here: Rows | None = None
        #: orders the backward of the lookup after that of the rows; None without gradients
        self.ticket: Tensor | None = None
        self.rows: Tensor | None = None
        self._pending: IssuedOutput | None = None

    def wait(self) -> Tensor:
        """``[B, output width]``; flat ``[n, D]`` of each block for a sequence collection. Waits once."""
        if self.rows is None:
            if self.ticket is None:
                self.rows = self.receive()
            else:
                self.rows = _Wait.apply(self.ticket, self)
        assert self.rows is not None
        bags, self.ticket = self.lookup_input.bags, None
        return self.rows if bags is None else self.executor._to_samples(self.rows, self.lookup_input)

    @torch.no_grad()
    def look_up(self) -> None:
        """Looks up the rows of this rank's shards."""
        if self.rows is None and self._here is None:
            self._here = self.executor.read(self.lookup_input, self.training)

    def issue(self) -> None:
        """Issues the exchange, after the lookup."""
        if self.rows is not None:
            return
        if self.training:
            self.ticket = _Issue.apply(self.executor.anchor, self.lookup_input.local_batch.weights, self)
        else:
            self.send()

    @torch.no_grad()
    def send(self) -> None:
        """As `issue`, without a node of autograd."""
        self.look_up()
        assert self._here is not None
        self.saved, rows, self._here = self._here.saved, self._here, None
        self._pending = self.executor.issue_output(rows, self.lookup_input)

    @torch.no_grad()
    def receive(self) -> Tensor:
        """Waits for the exchange."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return self.executor.receive_output(pending)


class _Issue(torch.autograd.Function):
    """Forward: looks up and issues the output exchange. Backward: waits for the gradients and steps the tables."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weights: Tensor | None, pending: PendingRows) -> Tensor:
        pending.send()
        ctx.saved, ctx.executor = pending.saved, pending.executor
        return anchor.new_empty(())  # carries no number, only the order of backward

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor | None, None]:
        saved, ctx.saved = ctx.saved, None
        try:
            return None, ctx.executor.finish_backward(saved), None
        except RankLost:
            raise
        except Exception as error:
            if ctx.executor.env.pg is None:
                raise
            raise_after_backward(error)
            return None, None, None


class _Wait(torch.autograd.Function):
    """Forward: waits for the output exchange. Backward: issues the gradient exchange.

    Autograd runs the backward of what the model computes between `_Issue` and `_Wait` before that of `_Issue`: the
    gradients travel meanwhile.
    """

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, pending: PendingRows) -> Tensor:
        ctx.saved, ctx.executor = pending.saved, pending.executor
        pending.saved = None
        return pending.receive()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.saved is None:
            raise RuntimeError(
                "backward ran twice through one sharded lookup: the first run has stepped the tables. "
                "Fix: call the model again before the second backward"
            )
        saved, ctx.saved = ctx.saved, None
        if torch.is_grad_enabled():
            saved.failed = RuntimeError(
                "create_graph=True reached a sharded lookup, whose backward steps the tables and has no derivative. "
                "Fix: call backward without create_graph, or detach the output of the collection"
            )
            raise_after_backward(saved.failed)
        ctx.executor.begin_backward(saved, grad)
        return ctx.executor.anchor.detach(), None
