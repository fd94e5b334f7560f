"""The one executor: it runs any tiling.

The output exchange is issued when a collection is called and waited for when its output is first used. Backward issues
the gradient exchange when it reaches the output and waits for it when it reaches the call. What the model computes in
between runs while the messages travel.

::

    features (local batch, KJT)
      -> route, send     ids to the ranks whose shards store their rows                two messages: sizes, ids
      -> look_up         one kernel call for each kind of shard on this rank
      -> give, join      rows to their source ranks; row shards added, columns joined  one message
      -> output (local batch)
    split, update        backward in reverse; the optimizers step inside the kernels   one message

``exchanged`` shard features send rows to other ranks. ``replicated`` ones (data parallel) look up the local batch only
and apply the gradients of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from recshard_lab.comm import (
    Failed,
    RankLost,
    ShardingEnv,
    complete,
    failing_rank,
    num_issued,
    raise_after_backward,
)
from recshard_lab.comm.errors import described, rebuilt
from recshard_lab.distributed.awaitable import NoWait
from recshard_lab.distributed.step.batch import LookupInput
from recshard_lab.distributed.step.input_dist import InputDist, PendingInput
from recshard_lab.distributed.step.kernels import KernelCalls
from recshard_lab.distributed.step.layout import CollectionOptions, Layout
from recshard_lab.distributed.step.lookup import GroupKind, RankLookup
from recshard_lab.distributed.step.output_dist import LocalOutput, PooledOutput, SequenceOutput
from recshard_lab.distributed.step.program import Call, Program, Signature, Step, compile_step
from recshard_lab.embedding.inputs import OutOfRange
from recshard_lab.embedding.scaled_loss import watch, watch_scalers
from recshard_lab.sparse import KeyedJaggedTensor

Recorder = Callable[[str, str, Any], None]
"""Called with a stage, the name of a call and its result, see `Executor.record`."""

_BYTES = attrgetter("nbytes")
_KEPT_PROGRAMS = 8  # each variable batch has another signature


@dataclass(slots=True, eq=False)
class OutputPaths:
    """The output exchanges over one set of connections.

    Attributes:
        route: for batches whose features have equally many bags.
        variable: for variable batches.
    """

    route: PooledOutput | SequenceOutput | LocalOutput
    variable: PooledOutput


class Executor:
    """Runs a collection's tables under one tiling.

    Args:
        layout: which rank stores and looks up which shards.
        kinds: kernel kinds, as numbered in the layout's groups.
        env: the ranks.
        device: of the shards.
        options: settings that hold for all tables.
        policy: for ids out of range.
        pooled: False for sequence collections.
    """

    def __init__(
        self,
        layout: Layout,
        kinds: list[GroupKind],
        env: ShardingEnv,
        device: torch.device,
        options: CollectionOptions,
        policy: OutOfRange,
        *,
        pooled: bool,
    ) -> None:
        self.layout, self.env, self.device, self.pooled, self.codecs = layout, env, device, pooled, options.codecs
        weighted, distinct = options.weighted, options.use_index_dedup
        self.input_dist = InputDist(layout, env, pooled=pooled, weighted=weighted, policy=policy, distinct=distinct)
        self.output_dtype = options.output_dtype or layout.rows_dtype
        self.lookup = RankLookup(layout, kinds, env.rank, pooled, device)
        self.kernels = KernelCalls(self.lookup, layout, kinds, env, device, pooled=pooled, weighted=weighted)
        self.paths = self.output_paths(env)
        self._programs: dict[tuple[OutputPaths, Signature], Program] = {}
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        #: names of tables and their parameters on this rank, for `_frozen`
        self.parameters: list[tuple[str, nn.Parameter]] = []
        self.buffer_bytes = {"input_buffers": 0, "output_buffers": 0}
        self._moved_away = False
        #: name of a table that a kernel steps; None if torch optimizers step all of them
        self.stepped: str | None = None
        watch_scalers()
        self.recorder: Recorder | None = None

    def record(self, recorder: Recorder | None) -> None:
        """Calls ``recorder`` after each call of the coming steps; None ends it.

        It gets the stage, the name of the call, and its result::

            "route"     "batch", the local `KeyedJaggedTensor`; "pack", `Packed`, but not where nothing is packed
            "send"      "unpack", `LookupInput`: the ids to look up here
            "look_up"   for each kernel its rows
            "join"      the output ``[B, output width]`` of the local batch, last
            "split"     "gradient", that of the output, before the exchange
            "update"    "gradients", `KernelGradients` of one kernel; then "step", once it has stepped

        The recorder must copy what it keeps: later calls write into some of these tensors.
        """
        self.recorder = self.input_dist.recorder = recorder

    def retire(self) -> None:
        """Marks this executor stale after resharding. In-flight batches raise."""
        self._moved_away = True

    def start(self, features: KeyedJaggedTensor) -> PendingInput | NoWait[LookupInput]:
        """Sends the local batch. Several batches may be in flight."""
        return self.announce(features)()

    def announce(self, features: KeyedJaggedTensor) -> Callable[[], PendingInput | NoWait[LookupInput]]:
        """Sends the sizes of the local batch, see `InputDist.announce`."""
        if self.recorder is not None:
            self.recorder("route", "batch", features)
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

    # ---- from the lookup on

    def run(self, step: Step, stage: str) -> None:
        """Runs the calls of a stage, and keeps an error as ``step.failed``: of this rank, or of one that sent it.

        After an error, of an earlier stage as well, it issues the messages of the stage, for which other ranks wait.
        """
        calls, issued, error = step.program[stage], num_issued(), step.failed
        if error is None:
            try:
                for call in calls:
                    result = call.run(step)
                    if self.recorder is not None:
                        self.recorder(stage, call.name, result)
                return
            except Exception as raised:
                error = raised
        if calls:
            failed = step.failed = complete(self.env, error, issued, partial(_drain, step, calls))
            own = failing_rank(failed.error) == self.env.world.rank
            # without the traceback, whose frames have this executor
            self.input_dist.error = rebuilt(described(failed.error)) if own and not failed.known else None
            del failed
        del error  # its traceback has this frame: a cycle, in which the model would outlive its last reference

    def program(self, lookup_input: LookupInput, paths: OutputPaths | None = None) -> Program:
        """The calls for such a batch, over these connections or the collection's. Compiles them at its first batch."""
        paths, local_batch, bags = paths or self.paths, lookup_input.local_batch, lookup_input.bags
        rows: tuple[int, ...] = (local_batch.batch_size,)
        by_source = None
        if bags is not None:
            rows, by_source = tuple(own.numel() for own in local_batch.lengths), tuple(map(tuple, bags.tolist()))
        signature = Signature(
            tuple(lookup_input.segments),
            rows,
            by_source,
            self.kernels.deferred is not None,
            lookup_input.weight_gradients is not None,
        )
        program = self._programs.get((paths, signature))
        if program is None:
            output = paths.route if bags is None else paths.variable
            program = compile_step([self.kernels.before, output.calls, self.kernels.after], signature)
            while len(self._programs) >= _KEPT_PROGRAMS:
                oldest, *_ = self._programs
                self._programs.pop(oldest, None)  # another thread may do so, too
            self._programs[paths, signature] = program
        return program

    def output_paths(self, env: ShardingEnv) -> OutputPaths:
        """Output exchanges over other connections between the same ranks."""
        route: Any = LocalOutput()
        if not LocalOutput.is_enough(self.layout, len(self.lookup.groups)):
            route = (PooledOutput if self.pooled else SequenceOutput)(self.layout, env, self.codecs, self.device)
        return OutputPaths(route, PooledOutput(self.layout, env, self.codecs, self.device, variable=True))

    def step(self, lookup_input: LookupInput, trains: bool, paths: OutputPaths | None = None) -> Step:
        """A step of these ids, whose rows go over these connections or the collection's.

        Raises:
            ValueError: the batch was sent before the tables moved.
        """
        if self._moved_away or lookup_input.local_batch.layout is not self.layout:
            raise ValueError(
                "the tables have moved (dmp.reshard) since this batch was sent: its ids went where their rows no "
                "longer are. Fix: finish every lookup before dmp.reshard, or send the batch again"
            )
        if self.kernels.deferred is not None and lookup_input.weight_gradients is not None:
            raise ValueError(
                "per-sample weights require a gradient, and the steps of the tables are deferred "
                "(fused_optimizer.defer_steps, GradientClippingOptimizer): kernels compute that gradient when they "
                "step. Fix: detach the weights, or let the tables step in backward"
            )
        if lookup_input.looked_up is not None and lookup_input.local_batch.weights is not None:
            raise ValueError(
                "per-sample weights that require a gradient cannot be looked up ahead of the forward that makes "
                "them. Fix: use TrainPipelineSparseDist, or detach the weights"
            )
        program = self.program(lookup_input, paths)
        return Step(lookup_input, program, trains, lookup_input.error, self.stepped or "")

    def begin(self, lookup_input: LookupInput) -> PendingRows:
        """Looks up remote ids and issues the output exchange. ``wait()`` returns the rows of the local batch.

        With gradients on, ``wait()`` returns a tensor whose backward steps the tables.

        Raises:
            ValueError: the batch was sent before the tables moved.
        """
        pending = self.compute(lookup_input)
        pending.issue()
        return pending

    def compute(self, lookup_input: LookupInput) -> PendingRows:
        """Looks up remote ids. ``issue()`` issues the output exchange, and ``wait()`` returns as that of `begin`.

        Raises:
            ValueError: the batch was sent before the tables moved.
        """
        step = self.step(lookup_input, torch.is_grad_enabled())
        if lookup_input.looked_up is None:
            self.look_up(step)
        return PendingRows(self, step)

    @torch.no_grad()
    def look_up(self, step: Step) -> None:
        """Looks up remote ids. When it returns, the tables may be stepped. `receive` raises its errors."""
        if step.trains and step.failed is None:  # the ids may have been sent ahead
            step.failed = self._frozen()
        self.run(step, "look_up")
        if step.trains and step.failed is None and self.stepped is not None:
            watch(step)

    @torch.no_grad()
    def give(self, step: Step) -> None:
        """Issues the output exchange, after the lookup."""
        self.run(step, "give")
        if step.program["give"]:  # the messages have the rows of exchanged kernels
            sent = len(step.rows[: len(self.lookup.exchanged)])
            step.rows[:sent] = [self.anchor.detach()] * sent

    @torch.no_grad()
    def receive(self, step: Step) -> Tensor:
        """Waits for what `give` sent: the rows of the local batch.

        Raises:
            Exception: the lookup or the output exchange failed on a rank. Every rank raises it, and it names the rank.
                If other ranks do not know of it, this rank raises it after backward, so that they need not wait.
        """
        self.run(step, "join")
        if isinstance(step.failed, Failed):
            if step.failed.known or not step.trains:
                _raise(step)
            step.output = self._nothing(step.lookup_input)  # other ranks wait for this one in backward
        out, lookup_input = step.output.to(self.output_dtype), step.lookup_input
        del step.output
        step.rows, step.program = [], {}  # a step that is kept for backward keeps no executor alive
        held = [lookup_input.ids, lookup_input.lengths, lookup_input.copies]
        held += [] if lookup_input.weights is None else [lookup_input.weights]
        self.buffer_bytes["input_buffers"] = sum(map(_BYTES, held))
        self.buffer_bytes["output_buffers"] = out.nbytes + step.message_bytes
        return out

    def _nothing(self, lookup_input: LookupInput) -> Tensor:
        """The output of a step that failed."""
        local_batch, blocks = lookup_input.local_batch, self.layout.blocks
        if self.pooled and lookup_input.bags is None:
            return torch.zeros(local_batch.batch_size, self.layout.output_width, device=self.device)
        rows = [own.numel() for own in local_batch.lengths] if self.pooled else local_batch.counts
        size = sum(n * block.dim for n, block in zip(rows, blocks, strict=True))
        return torch.zeros(size, device=self.device)

    @torch.no_grad()
    def split(self, step: Step, grad: Tensor) -> None:
        """Issues the gradient exchange of a batch. `update` must follow: it raises errors of both.

        Raises:
            ValueError: the tables have moved since the batch was looked up.
        """
        if self._moved_away:
            raise ValueError(
                "the tables have moved (dmp.reshard) since this batch was looked up: its gradients would step the "
                "rows that were left behind. Fix: call backward before dmp.reshard"
            )
        step.program = self.program(step.lookup_input)  # steps may be deferred since, or rows looked up ahead
        step.grad, step.message_bytes = grad, 0
        self.run(step, "split")

    @torch.no_grad()
    def update(self, step: Step) -> Tensor | None:
        """Waits for the gradients and steps the tables' optimizers.

        Gradients are averaged over ranks, as DistributedDataParallel does for the dense part.

        Returns:
            The gradient of this rank's per-sample weights, of its own loss, where they require one.

        Raises:
            Exception: a part of backward failed on a rank. Every rank that receives a message after it raises it, and
                it names the rank. The other ranks raise it with their next batch.
        """
        self.run(step, "update")
        if isinstance(step.failed, Failed):
            _raise(step)
        held = step.grad.nbytes + step.message_bytes
        self.buffer_bytes["output_buffers"] = max(self.buffer_bytes["output_buffers"], held)
        step.kept, step.weights, step.program = [], {}, {}
        del step.grad, step.columns
        return step.weight_grad

    @torch.no_grad()
    def step_deferred(self) -> None:
        """Steps the fused tables once, with the gradients of all batches since the last step. Collective.

        Raises:
            Exception: the step failed on a rank, before row norms were exchanged. Names the rank.
        """
        step = self.kernels.deferred_step()
        if step is None:
            return
        self.run(step, "update")
        if isinstance(step.failed, Failed):
            _raise(step)

    # ---- slow tiers

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


def _raise(step: Step) -> NoReturn:
    """Raises the error of a step, of which nothing has a reference then: its traceback has the step."""
    assert isinstance(step.failed, Failed)
    error, step.failed = step.failed.error, None
    if step.lookup_input is not None:
        step.lookup_input.error = None
    try:
        raise error
    finally:
        del error


def _drain(step: Step, calls: Sequence[Call]) -> None:
    """Issues the messages of these calls."""
    for call in calls:
        if call.drain is not None:
            call.drain(step)


class PendingRows:
    """Rows on their way to the ranks of their samples.

    Args:
        executor: that runs the step.
        step: of these rows. The graph of autograd has it, so it must not have a tensor of that graph.
    """

    def __init__(self, executor: Executor, step: Step) -> None:
        self.executor, self.step, self.lookup_input = executor, step, step.lookup_input
        #: orders the backward of the lookup after that of the rows; None without gradients
        self._ticket: Tensor | None = None
        self._rows = step.lookup_input.looked_up

    def issue(self) -> None:
        """Issues the output exchange, after the lookup."""
        if self._rows is None:
            executor, step = self.executor, self.step
            if step.trains:
                self._ticket = _Issue.apply(executor.anchor, self.lookup_input.local_batch.weights, executor, step)
            else:
                executor.give(step)

    def wait(self) -> Tensor:
        """``[B, output width]``; flat ``[n, D]`` of each block for a sequence collection. Waits once."""
        if self._rows is None:
            executor, step, ticket = self.executor, self.step, self._ticket
            self._rows = executor.receive(step) if ticket is None else _Wait.apply(ticket, executor, step)
            self._ticket = None
        assert self._rows is not None
        return self._rows if self.lookup_input.bags is None else self._by_sample(self._rows)

    def _by_sample(self, flat: Tensor) -> Tensor:
        """``[B, output width]`` of a variable batch, or of a batch that is variable on another rank."""
        local_batch, dims = self.lookup_input.local_batch, [block.dim for block in self.executor.layout.blocks]
        sizes = [lengths.numel() * dim for lengths, dim in zip(local_batch.lengths, dims, strict=True)]
        blocks = [part.view(-1, dim) for part, dim in zip(flat.split(sizes), dims, strict=True)]
        if local_batch.inverse is not None:
            blocks = [rows.index_select(0, bag) for rows, bag in zip(blocks, local_batch.inverse, strict=True)]
        return torch.cat(blocks, 1)


class _Issue(torch.autograd.Function):
    """Forward: issues the output exchange. Backward: waits for the gradients and steps the tables."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weights: Tensor | None, executor: Executor, step: Step) -> Tensor:
        executor.give(step)
        ctx.executor, ctx.saved = executor, step
        return anchor.new_empty(())  # carries no number, only the order of backward

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor | None, None, None]:
        step, ctx.saved = ctx.saved, None
        try:
            return None, ctx.executor.update(step), None, None
        except RankLost:
            raise
        except Exception as error:
            if ctx.executor.env.pg is None:
                raise
            raise_after_backward(error)
            return None, None, None, None


class _Wait(torch.autograd.Function):
    """Forward: waits for the output exchange. Backward: issues the gradient exchange.

    Autograd runs the backward of what the model computes between `_Issue` and `_Wait` before that of `_Issue`: the
    gradients travel meanwhile.
    """

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, executor: Executor, step: Step) -> Tensor:
        ctx.executor, ctx.saved = executor, step
        return executor.receive(step)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.saved is None:
            raise RuntimeError(
                "backward ran twice through one sharded lookup: the first run has stepped the tables. "
                "Fix: call the model again before the second backward"
            )
        step, ctx.saved = ctx.saved, None
        if torch.is_grad_enabled():
            step.failed = RuntimeError(
                "create_graph=True reached a sharded lookup, whose backward steps the tables and has no derivative. "
                "Fix: call backward without create_graph, or detach the output of the collection"
            )
            raise_after_backward(step.failed)
        ctx.executor.split(step, grad)
        return ctx.executor.anchor.detach(), None, None
