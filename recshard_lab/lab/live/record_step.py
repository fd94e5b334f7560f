"""What runs on every rank while a step is recorded: a recorder copies what the executor's stages hand on.

::

    executor.record(StepRecorder)  ->  zero_grad, model(batch), loss, backward, optimizer  ->  executor.record(None)

Shape letters: B samples of a rank, N ids, R replicated shard features, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import accumulate
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from recshard_lab.comm import trace
from recshard_lab.distributed.step.layout import Layout, ShardFeature
from recshard_lab.lab.live.recorded_step import BlockInfo, RankRecord, ShardFeatureRecord, ShardInfo, SourceRows
from recshard_lab.sharding import ShardingPlan

_TIMES = {  # stage of the executor -> the time that its calls belong to
    "route": "ids_sent",
    "send": "ids_arrived",
    "look_up": "lookup",
    "give": "output",
    "join": "output",
    "split": "gradients_arrived",
    "update": "gradients_arrived",
}
_TIMES_OF_CALLS = {"batch": "batch", "gradient": "dense", "step": "optimizer", "end": "optimizer"}


class StepRecorder:
    """Copies what the stages of one step hand on, for `Executor.record`.

    Args:
        collection: a sharded collection of pooled tables.
    """

    def __init__(self, collection: Any) -> None:
        self.executor, self.layout = collection.executor, collection.layout
        self.rank = collection.env.rank
        self.device = collection.device
        self.found: dict[str, Any] = {}
        self.sent: list[tuple[ShardInfo, np.ndarray]] = []
        self.rows: list[Tensor] = []
        self.kernel_grads: dict[int, Tensor] = {}
        self.ms: dict[str, float] = {}
        self.left_at = 0.0

    def begin(self) -> None:
        """Starts the clock."""
        self.left_at = perf_counter()

    def __call__(self, stage: str, call: str, result: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        ended = perf_counter()
        if call == "batch" and call in self.found:
            raise ValueError(
                "the batch is looked up twice, and one lookup is recorded. Fix: a model that calls the collection once "
                "in a step"
            )
        done = _TIMES_OF_CALLS.get(call) or _TIMES[stage]
        self.ms[done] = self.ms.get(done, 0.0) + 1000 * (ended - self.left_at)
        if call == "batch":
            self.found[call] = result
        elif call == "pack":
            self.sent = list(_ids_of_messages(result, self.layout))
        elif call == "unpack":
            self._ids_arrived(result)
        elif call == "gradients":
            self.kernel_grads[id(result.group)] = result.grads[0].detach().clone()
        elif stage == "look_up":
            self.rows.append(result)
        elif stage == "join" or call == "gradient":
            self.found[stage] = _numpy(result)
        self.left_at = perf_counter()

    def _ids_arrived(self, lookup_input: Any) -> None:
        self.found["unpack"] = lookup_input
        counts = lookup_input.counts
        ends = np.cumsum(counts.reshape(-1)).reshape(counts.shape)
        self.ids = [
            [_numpy(lookup_input.ids[end - count : end]) for end, count in zip(*pair, strict=True)]
            for pair in zip(ends.tolist(), counts.tolist(), strict=True)
        ]
        weights = self.executor.lookup.weights()
        self.touched = [np.unique(np.concatenate(own)) for own in self.ids]
        self.before = [self._rows(weights, number) for number in range(len(self.ids))]

    def _rows(self, weights: dict[tuple[int, int], Tensor], number: int) -> np.ndarray:
        feature = self.layout.rank_features[self.rank][number]
        weight = weights[feature.table, feature.shard_index]
        return _numpy(weight[torch.as_tensor(self.touched[number], dtype=torch.int64, device=weight.device)])

    def finish(self, loss: float, traffic: Any) -> RankRecord:
        """The record, when the step has ended."""
        weights = self.executor.lookup.weights()
        lookup_input = self.found["unpack"]
        features: list[ShardFeatureRecord] = []
        for group, own in zip(self.executor.lookup.groups, self.rows, strict=True):
            grads = self.kernel_grads[id(group)]
            for place, feature in enumerate(group.features):
                number = group.first + place
                sources = tuple(self._sources(group, place, number, lookup_input, own, grads))
                features.append(
                    ShardFeatureRecord(
                        _info(feature),
                        sources,
                        self.touched[number],
                        self.before[number],
                        self._rows(weights, number),
                    )
                )
        batch, blocks = self.found["batch"], self.layout.blocks
        parts = {key: batch[key] for key in {block.feature: None for block in blocks}}
        local = {key: (_numpy(part.lengths()), _numpy(part.values())) for key, part in parts.items()}
        width = self.layout.output_width
        return RankRecord(
            batch_size=batch.stride(),
            batch=local,
            sent=tuple(self.sent),
            shard_features=tuple(features),
            output=self.found["join"].reshape(-1, width),
            grad=self.found["split"].reshape(-1, width),
            loss=loss,
            traffic=tuple((event.label, event.bytes_to, event.ms) for event in traffic.events),
            ms=self.ms,
        )

    def _sources(
        self, group: Any, place: int, number: int, lookup_input: Any, rows: Tensor, grads: Tensor
    ) -> Iterator[SourceRows]:
        """What one shard feature got from each rank: the kernel's rows have the sources below each other."""
        columns = [feature.shard.num_cols for feature in group.features]
        start, width = sum(columns[:place]), columns[place]
        counts = lookup_input.counts[number]
        pooled, copy = group.kernel.pooled, group.first_copy is not None
        if copy:
            column = number - group.first_copy
            lengths, bags = lookup_input.copies[column], lookup_input.copy_bags[:, column]
        elif pooled:
            lengths, bags = lookup_input.lengths[number], np.array(lookup_input.segments)
        else:
            lengths, bags = None, counts
        grads_here = _columns(grads, group, lookup_input, place, start, width, pooled)
        if copy:
            rows_here = rows[: lookup_input.local_batch.replicas[column].num_bags, start : start + width]
        else:
            rows_here = _columns(rows, group, lookup_input, place, start, width, pooled)
        ends = list(accumulate(bags.tolist()))
        for source, (end, size) in enumerate(zip(ends, bags.tolist(), strict=True)):
            own = None
            if not copy:
                own = _numpy(rows_here[end - size : end])
            elif source == self.rank:
                own = _numpy(rows_here)
            sizes = None if lengths is None else _numpy(lengths[end - size : end])
            distinct = copy and lookup_input.local_batch is not None and self._distinct(sizes, source, number)
            yield SourceRows(
                self.ids[number][source], None if distinct else sizes, own, _numpy(grads_here[end - size : end])
            )

    def _distinct(self, sizes: np.ndarray | None, source: int, number: int) -> bool:
        """Whether a source sent a replica its distinct rows: they arrive as bags with one id, ascending."""
        ids = self.ids[number][source]
        return sizes is not None and bool((sizes == 1).all()) and bool((np.diff(ids) > 0).all())


def _columns(rows: Tensor, group: Any, lookup_input: Any, place: int, start: int, width: int, pooled: bool) -> Tensor:
    """``[S, width]`` of one shard feature, out of the rows or gradients of its kernel."""
    if pooled:
        return rows[:, start : start + width]
    sizes = [
        int(lookup_input.counts[number].sum()) * feature.shard.num_cols
        for number, feature in enumerate(group.features, group.first)
    ]
    return rows.reshape(-1).split(sizes)[place].view(-1, width)


def _ids_of_messages(packed: Any, layout: Layout) -> Iterator[tuple[ShardInfo, np.ndarray]]:
    """The ids in the message for each rank, by shard feature; lengths stand before them and weights behind them."""
    local, number = packed.local_batch, 0
    for rank, parts in enumerate(packed.parts):
        flat = np.concatenate([_numpy(part) for part in parts]) if parts else np.empty(0, dtype=np.int64)
        exchanged = layout.exchanged_features[rank]
        sizes = local.sent[number : number + len(exchanged)].tolist()
        number += len(exchanged)
        lengths = layout.pooled_counts[rank] * local.batch_size
        for own, touched in zip(local.replicas, local.touched, strict=True):
            lengths += own.num_bags if touched is None else 0
            sizes.append(own.num_ids if touched is None else touched.rows.numel())
        features = [*exchanged, *(f for f in layout.rank_features[rank] if f.replicated)]
        ends = accumulate(sizes)
        for feature, size, end in zip(features, sizes, ends, strict=True):
            yield _info(feature), flat[lengths + end - size : lengths + end]


def _info(feature: ShardFeature) -> ShardInfo:
    shard = feature.shard
    return ShardInfo(feature.block, shard.rank, shard.rows, shard.cols, feature.replicated)


def _numpy(tensor: Tensor) -> np.ndarray:
    """A copy on the host; of numbers as float32 or float64."""
    copied = tensor.detach()
    if copied.is_floating_point() and copied.dtype is not torch.float64:
        copied = copied.float()
    found: np.ndarray = copied.cpu().clone().numpy()
    return found


def record_step(
    model: Any,
    batch: Any,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Any = None,
    path: str | None = None,
) -> dict[str, Any]:
    """Trains one step and records it. Collective.

    Returns:
        ``record``, ``plan``, ``path``, ``blocks``, ``dense_parameters``, ``dense_stepped``.

    Raises:
        ValueError: a collection that cannot be shown, or a model that returns no loss.
    """
    path = _path(model, path)
    collection = model.collections[path]
    _check(collection)
    recorder = StepRecorder(collection)
    if dist.is_initialized():
        dist.barrier()  # so that no stage contains waiting for a rank that comes late
    collection.executor.record(recorder)
    try:
        with trace() as sent:
            recorder.begin()
            number = _step(model, batch, loss, optimizer)
            recorder("update", "end", None)
    finally:
        collection.executor.record(None)
    tables = collection.tables
    dense = [parameter for parameter in model.dense_parameters() if parameter.requires_grad]
    return {
        "record": recorder.finish(number, sent),
        "plan": model.plan.to_json(),
        "path": path,
        "blocks": [
            BlockInfo(tables[block.table].name, block.feature, block.start, block.dim, block.mean)
            for block in collection.layout.blocks
        ],
        "dense_parameters": sum(parameter.numel() for parameter in dense),
        "dense_stepped": optimizer is not None,
    }


def record_under(
    model: Any,
    batch: Any,
    loss: Callable[[Any], Tensor] | None,
    optimizer: Any,
    path: str | None,
    plans: dict[str, str],
) -> dict[str, dict[str, Any]]:
    """Plan's name -> `record_step` under it; each begins with the same weights. Collective.

    Raises:
        ValueError: as `record_step`.
    """
    first, found = model.plan, {}
    for name, text in plans.items():
        model.reshard(_whole(model, ShardingPlan.from_json(text)))
        with _restored(model, optimizer):
            found[name] = record_step(model, batch, loss, optimizer, path)
    model.reshard(first)
    return found


def _whole(model: Any, plan: ShardingPlan) -> ShardingPlan:
    """A plan with all tables of the model, under their module paths."""
    named = plan.tables()
    return ShardingPlan(
        {path: type(own)({**own, **{n: named[n] for n in own if n in named}}) for path, own in model.plan.plan.items()}
    )


@contextmanager
def _restored(model: Any, optimizer: Any) -> Iterator[None]:
    """Weights, optimizer states, buffers and dense gradients are afterwards as they were."""
    held: list[Tensor] = [*model.dense_parameters(), *model.buffers()]
    for collection in model.collections.values():
        _check(collection)
        held += collection.executor.lookup.weights().values()
        held += [state for own in collection.executor.lookup.states().values() for state in own.values()]
    with torch.no_grad():
        kept = [tensor.detach().clone() for tensor in held]
        state = None if optimizer is None else deepcopy(optimizer.state_dict())
        yield
        for tensor, before in zip(held, kept, strict=True):
            tensor.copy_(before)
        if state is not None:
            optimizer.load_state_dict(state)


def _step(model: Any, batch: Any, loss: Callable[[Any], Tensor] | None, optimizer: Any) -> float:
    with torch.enable_grad():
        (model if optimizer is None else optimizer).zero_grad()
        output = model(batch)
        value = loss(output) if loss is not None else output[0] if isinstance(output, tuple) else output
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(
                f"a step needs a loss of one number, got {type(value).__name__}"
                f"{f' of shape {tuple(value.shape)}' if isinstance(value, Tensor) else ''}. "
                f"Fix: loss='lambda output: ...', a function on the ranks of what the model returns"
            )
        value.backward()
        if optimizer is not None:
            optimizer.step()
    return float(value.detach())


def _path(model: Any, path: str | None) -> str:
    paths: list[str] = list(model.collections)
    if not paths:
        raise ValueError("the model has no sharded collection. Fix: a model with an EmbeddingBagCollection")
    if path is None and len(paths) == 1:
        return paths[0]
    if path is None or path not in paths:
        raise ValueError(
            f"path must be a collection of the model, one of {paths}, got {path!r}. Fix: path={paths[0]!r}"
        )
    return path


def _check(collection: Any) -> None:
    if not collection.pooled:
        raise ValueError(
            "StepThrough shows pooled tables, and this is an EmbeddingCollection. "
            "Fix: path= of an EmbeddingBagCollection"
        )
    deferred = collection.executor.kernels.deferred
    if deferred is not None and deferred.batches:
        raise ValueError(
            f"gradients of {deferred.batches} earlier batches wait for the optimizer, and one step is recorded. "
            f"Fix: call the optimizer's step first"
        )
    odd: Sequence[str] = [table.name for table in collection.tables if table.dynamic] or [
        name for name, own in collection.shardings.items() if own.cache_params is not None
    ]
    if odd:
        raise ValueError(
            f"StepThrough shows tables whose ids are rows, and table {odd[0]!r} is dynamic, managed or cached. "
            f"Fix: a plan with compute_kernel='fused', and static tables"
        )
