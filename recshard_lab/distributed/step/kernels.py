"""What the kernels of a rank do in a step: the calls that they add to its stages.

::

    look_up    rows of each kernel
    split      the gradient of the output, in the dtype of rows
    update     gradients of each kernel's rows, then its step

Column shards of a row whose optimizer needs the row's norm add their squares first (`RowNormExchange`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.comm import ShardingEnv
from recshard_lab.distributed.step.batch import LookupInput
from recshard_lab.distributed.step.gradients import (
    Deferred,
    KernelGradients,
    RowNormExchange,
    exchange_weight_gradients,
    of_replicas,
    send_any_weight_gradients,
)
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.lookup import GroupKind, RankLookup, ShardLookup
from recshard_lab.distributed.step.messages import Columns
from recshard_lab.distributed.step.program import Call, Calls, Signature, Step
from recshard_lab.embedding.managed_collision.kernel import ManagedKernel

Listener = Callable[[ShardLookup, Tensor, list[int]], None]


class KernelCalls:
    """The calls of a rank's kernels. It has no reference to the executor, whose programs have these calls.

    Args:
        lookup: the kernels.
        layout: which rank stores and looks up which shards.
        kinds: kernel kinds, as numbered in the layout's groups.
        env: the ranks.
        device: of the shards.
        pooled: False for sequence collections.
        weighted: whether batches carry per-sample weights.
    """

    def __init__(
        self,
        lookup: RankLookup,
        layout: Layout,
        kinds: Sequence[GroupKind],
        env: ShardingEnv,
        device: torch.device,
        *,
        pooled: bool,
        weighted: bool,
    ) -> None:
        self.lookup, self.layout, self.env, self.device = lookup, layout, env, device
        self.pooled, self.weighted = pooled, weighted
        #: for each kind whose column shards add their squares: this rank's group, if any, rounds a step, the exchange
        self.row_norms: list[tuple[ShardLookup | None, int, RowNormExchange]] = []
        for kind in kinds:
            if kind.optimizer is not None and kind.joins_norms:
                here = next((group for group in self.lookup.exchanged if group.kind == kind), None)
                exchange = RowNormExchange(layout, env, here.shards if here else [], device)
                self.row_norms.append((here, kind.optimizer.row_norm_rounds, exchange))
        #: parameters of tables on the dense kernel, each with the kernel's view of the same memory
        self.dense: list[tuple[nn.Parameter, Tensor]] = []
        #: gradients that wait for `step_deferred`; None where fused tables step in backward
        self.deferred: Deferred | None = None
        #: called before every lookup with the group, its ids ``[N]`` by shard feature, and their number in each
        self.listener: Listener | None = None

    def deferred_step(self) -> Step | None:
        """A step of the fused tables with the gradients of all batches since the last one; None without a batch."""
        assert self.deferred is not None
        if not self.deferred.batches:
            return None
        kernels = self.deferred.take()
        calls = [self._step_call(n) for n, own in kernels.items() if not own.group.kind.joins_norms]
        calls += self._row_norm_calls(lambda number, _: kernels[number].merged()[0])
        step = Step(None, {"update": tuple(calls)}, True)  # type: ignore[arg-type]
        step.kernels = dict(kernels)
        return step

    def before(self, signature: Signature) -> Calls:
        """The lookups; and what precedes the exchange of gradients."""
        look_up = [Call(f"look_up {n}", partial(self._rows, n, own)) for n, own in enumerate(self.lookup.groups)]
        if any(isinstance(group.kernel, ManagedKernel) for group in self.lookup.exchanged):
            look_up.append(Call("rows of ids", _join_managed_rows))
        split = [Call("gradient", self._gradient)]
        if self.weighted and self.lookup.replicated:
            split.append(Call("weights of replicas", self._weights_of_replicas))
        return {"look_up": look_up, "split": split}

    def _rows(self, number: int, group: ShardLookup, step: Step) -> Tensor:
        lookup_input, copy, ahead = step.lookup_input, group.first_copy is not None, None
        bags = group.own_bags(lookup_input.local_batch) if copy else group.bags(lookup_input)
        if self.listener is not None:
            self.listener(group, bags[0], bags[3])
        if lookup_input.prefetched is not None and not copy:
            ahead, lookup_input.prefetched[number] = lookup_input.prefetched[number], None
        if group.kernel.pooled and bags[1].numel() == 1:  # kernels do not get batches without a bag
            rows, kept = torch.zeros(0, group.width, device=self.device), None
        else:
            rows, kept = group.forward(bags, step.trains and not copy, ahead)
        step.rows.append(rows)
        if not copy:
            step.kept.append(kept)
        if isinstance(group.kernel, ManagedKernel):
            step.managed_rows.append(group.kernel.rows if bags[0].numel() else bags[0])
        return rows

    def _gradient(self, step: Step) -> Tensor:
        grad = step.grad.to(self.layout.rows_dtype)
        step.grad = grad.contiguous() if self.pooled else grad
        return step.grad

    def _weights_of_replicas(self, step: Step) -> None:
        step.copies = of_replicas(self.lookup, self.layout, step.grad, step.lookup_input)

    def after(self, signature: Signature) -> Calls:
        """The steps. Those that add squares of a row over ranks come last, on all ranks in the same order."""
        calls, waiting = [Call("columns", _read_columns)], []
        if self.dense:
            calls.append(Call("dense gradients", self._take_dense))
        for number, group in enumerate(self.lookup.groups):
            calls.append(Call("gradients", partial(self._gradients, signature.deferred, number, group)))
            if signature.deferred and group.kind.optimizer is not None:
                waiting.append(number)
            elif not group.kind.joins_norms:
                calls.append(self._step_call(number))
        if signature.deferred:
            calls.append(Call("keep gradients", partial(self._keep, waiting)))
        else:
            calls += self._row_norm_calls(lambda number, step: self.lookup.groups[number].bags(step.lookup_input))
        if self.dense:
            calls.append(Call("dense gradients", self._return_dense))
        if signature.weight_gradients:
            calls.append(Call("weight gradients", self._weight_gradients, self._send_any_weight_gradients))
        return {"update": calls}

    def _step_call(self, number: int, exchange: RowNormExchange | None = None, drain: Any = None) -> Call:
        def step_kernel(step: Step) -> None:
            gradients = step.kernels.pop(number)
            group, kept = gradients.group, gradients.kept
            if group.on_step is not None:
                for ids, _, _, counts, _ in gradients.bags:
                    group.on_step(ids, counts)
            if kept is not None:
                step.weights[number] = group.backward(kept, gradients.grads[0], exchange)
            else:
                bags, grad = gradients.merged()
                step.weights[number] = group.backward(group.remember(bags), grad, exchange)

        return Call("step", step_kernel, drain)

    def _row_norm_calls(self, bags_of: Callable[[int, Step], Any]) -> list[Call]:
        """The kernels that add squares over ranks. A rank without such a kernel takes part, as the others wait."""
        calls = []
        for here, rounds, exchange in self.row_norms:
            if here is None:
                nothing = partial(exchange.nothing, rounds)
                calls.append(Call("row norms", nothing, nothing))
            else:
                number = self.lookup.groups.index(here)
                drain = partial(_send_any_row_norms, here, exchange, partial(bags_of, number))
                calls.append(self._step_call(number, exchange, drain))
        return calls

    def _gradients(self, deferred: bool, number: int, group: ShardLookup, step: Step) -> KernelGradients:
        lookup_input = step.lookup_input
        own = step.columns.take(self._width(group, lookup_input))
        own = own if group.kernel.pooled else own.reshape(-1)
        kept = step.kept[number] if number < len(step.kept) else None
        if kept is not None and not deferred:
            bags = [] if group.on_step is None else [group.bags(lookup_input)]
            found = KernelGradients(group, bags, [own], kept)
        elif group.kernel.pooled and own.shape[0] == 0:
            found = KernelGradients(group, [group.no_ids(lookup_input)], [own.new_zeros(1, group.width)])
        else:
            found = KernelGradients(group, [group.bags(lookup_input)], [own], kept)
        step.kernels[number] = found
        return found

    def _width(self, group: ShardLookup, lookup_input: LookupInput) -> int:
        if group.kernel.pooled:
            return group.width
        features = enumerate(group.features, group.first)
        return sum(int(lookup_input.counts[number].sum()) * feature.shard.num_cols for number, feature in features)

    def _keep(self, numbers: Sequence[int], step: Step) -> None:
        assert self.deferred is not None
        self.deferred.add({number: step.kernels.pop(number) for number in numbers})

    def _take_dense(self, _: Step) -> None:
        for parameter, weight in self.dense:  # zero_grad may have been called since
            weight.grad = parameter.grad

    def _return_dense(self, _: Step) -> None:
        for parameter, weight in self.dense:
            parameter.grad = weight.grad

    def _weight_gradients(self, step: Step) -> None:
        found = [step.weights.get(number) for number in range(len(self.lookup.exchanged))]
        of_kernels = [own for own in found if own is not None]
        step.weight_grad = exchange_weight_gradients(of_kernels, step.copies, step.lookup_input, self.layout, self.env)

    def _send_any_weight_gradients(self, step: Step) -> None:
        send_any_weight_gradients(step.lookup_input, self.layout, self.env)


def _send_any_row_norms(
    group: ShardLookup, exchange: RowNormExchange, bags_of: Callable[[Step], Any], step: Step
) -> None:
    group.send_row_norms(bags_of(step), exchange)


def _read_columns(step: Step) -> None:
    step.columns = Columns([*step.grads, *step.copy_grads])
    step.grads, step.copy_grads = [], []


def _join_managed_rows(step: Step) -> None:
    step.lookup_input.rows = torch.cat(step.managed_rows)
