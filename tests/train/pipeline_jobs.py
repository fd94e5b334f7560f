"""What ranks run in the tests of the pipelines: the plain loop, and a pipeline, on equal models and batches."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import recshard_lab as rl
from recshard_lab.comm.wire import Then
from recshard_lab.data import Batch, RandomRecDataset
from recshard_lab.distributed.step import input_dist, messages
from recshard_lab.models import DLRM, DLRMTrain
from recshard_lab.train import pipelines

CPU = torch.device("cpu")
KEYS = ["a", "b", "c", "d"]
STEPS = 10


def place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def tables(keys: list[str] = KEYS) -> list[rl.EmbeddingBagConfig]:
    return [rl.EmbeddingBagConfig(name=f"t_{k}", num_embeddings=29, embedding_dim=8, feature_names=[k]) for k in keys]


def plan_of(collections: dict[str, nn.Module], world_size: int) -> rl.ShardingPlan:
    """Four schemes, a table each."""
    made = {}
    for path, collection in collections.items():
        schemes = [
            rl.table_wise(rank=world_size - 1),
            rl.row_wise(),
            rl.column_wise(ranks=list(range(world_size)) if world_size in (1, 2) else [0, 1]),
            rl.data_parallel(),
        ]
        names = [table.name for table in collection.embedding_bag_configs()]  # type: ignore[operator,union-attr]
        each = dict(zip(names, schemes, strict=False))
        made[path] = rl.sharding.construct_module_sharding_plan(
            collection, each, world_size=world_size, device_type="cpu"
        )
    return rl.ShardingPlan(made)


def sharder(optimizer: str = "exact_row_wise_adagrad") -> rl.distributed.EmbeddingBagCollectionSharder:
    return rl.distributed.EmbeddingBagCollectionSharder({"optimizer": optimizer, "learning_rate": 0.1})


def sharded(model: nn.Module, paths: Sequence[str], optimizer: str = "exact_row_wise_adagrad", **options: Any) -> Any:
    plan = plan_of({path: model.get_submodule(path) for path in paths}, place()[1])
    options = {"device": "cpu"} | options
    return rl.DistributedModelParallel(model, plan=plan, sharders=[sharder(optimizer)], **options)


def unsharded_dlrm() -> DLRMTrain:
    """The same weights at every call."""
    torch.manual_seed(3)
    return DLRMTrain(DLRM(rl.EmbeddingBagCollection(tables()), 3, [8], [4, 1]))


def dlrm(optimizer: str = "exact_row_wise_adagrad", **options: Any) -> rl.DistributedModelParallel:
    """The usual model, sharded."""
    return sharded(unsharded_dlrm(), ["model.embedding_bag_collection"], optimizer, **options)


class TwoSided(nn.Module):
    """Two collections: one reads the batch as it is, the other a batch that the model permutes first."""

    def __init__(self) -> None:
        super().__init__()
        self.left = rl.EmbeddingBagCollection(tables(["a", "b"]))
        self.right = rl.EmbeddingBagCollection(tables(["c", "d"]))
        self.over = nn.Linear(32, 1)

    def right_ids(self, batch: Batch) -> rl.KeyedJaggedTensor:
        return batch.sparse_features.permute([3, 2])

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        left = self.left(batch.sparse_features).values()
        right = self.right(self.right_ids(batch)).values()
        logits = self.over(torch.cat([left, right], 1)).flatten()
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.float())
        return loss, loss.detach()


def two_sided() -> rl.DistributedModelParallel:
    torch.manual_seed(4)
    return sharded(TwoSided(), ["left", "right"])


MODELS: dict[str, Callable[[], rl.DistributedModelParallel]] = {"dlrm": dlrm, "two_sided": two_sided}


def batches(count: int = STEPS, rank: int | None = None, first: int = 0) -> list[Batch]:
    """A rank's own."""
    own = place()[0] if rank is None else rank
    drawn = RandomRecDataset(
        KEYS, 6, hash_size=29, ids_per_feature=4, min_ids_per_feature=0, num_dense=3, manual_seed=100 + own + first,
        num_batches=count, num_generated_batches=count,
    )  # fmt: skip
    return list(drawn)


def dense_optimizer(model: rl.DistributedModelParallel) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.dense_parameters(), lr=0.2, momentum=0.5)


def plain_loop(model: rl.DistributedModelParallel, data: list[Batch]) -> list[float]:
    """What everybody writes."""
    optimizer, losses = dense_optimizer(model), []
    for batch in data:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def outputs(pipeline: Any, data: Iterator[Batch]) -> list[float]:
    found = []
    while True:
        try:
            output = pipeline.progress(data)
        except StopIteration:
            return found
        found.append(float(output[0] if isinstance(output, tuple) else output))


def progressed(pipeline: Any, data: Iterator[Batch]) -> tuple[int, list[tuple[int, pipelines.StageError]]]:
    """The number of steps, and every error of a stage with the number of steps before it."""
    done, errors = 0, []
    while True:
        try:
            pipeline.progress(data)
            done += 1
        except pipelines.StageError as error:
            errors.append((done, error))
        except StopIteration:
            return done, errors


def same_weights(one: rl.DistributedModelParallel, other: rl.DistributedModelParallel) -> list[str]:
    """Names of the tensors that differ in a bit, fused optimizer states included."""
    mine, theirs = one.full_state_dict(), other.full_state_dict()
    found = [name for name, own in mine.items() if not torch.equal(own, theirs[name])]
    for path, collection in one.collections.items():
        for table, shards in collection.table_shards().items():
            twin = other.collections[path].table_shards()[table]
            for number, states in shards.states.items():
                other_states = twin.states[number]
                found += [f"{table}.{n}" for n, own in states.items() if not torch.equal(own, other_states[n])]
    return found


class Compared(NamedTuple):
    differ: list[str]
    losses: list[float]
    plain: list[float]
    report: str
    pipelined: list[str]
    threads: list[str]


def compare(kind: str, model: str, **switches: Any) -> Compared:
    """A pipeline beside the plain loop."""
    ours, plain = MODELS[model](), MODELS[model]()
    data = batches()
    expected = plain_loop(plain, data)
    with getattr(pipelines, kind)(ours, dense_optimizer(ours), CPU, **switches) as pipeline:
        losses = outputs(pipeline, iter(data))
        report = pipeline.report()
    return Compared(same_weights(ours, plain), losses, expected, str(report), report.pipelined, alive())


def alive() -> list[str]:
    """Threads of pipelines that are still there."""
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("recshard-")]
    return [
        name for name in names if any(part in name for part in ("load", "input_dist", "sizes", "lookup", "prefetch"))
    ]


# ---- what goes wrong ----


class Faulty:
    """An iterator that fails once, at one batch, and goes on; ``at`` names the stage that is to fail."""

    def __init__(self, data: list[Batch], number: int, at: str) -> None:
        self.left, self.number, self.at, self.given = list(data), number, at, 0

    def __iter__(self) -> Faulty:
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        self.given += 1
        batch = self.left.pop(0)
        if self.given - 1 != self.number:
            return batch
        if self.at == "load":
            raise OSError("the disk is on fire")
        if self.at == "copy":
            return Uncopied()
        assert self.at == "input_dist"
        ids = batch.sparse_features
        wrong = rl.KeyedJaggedTensor(ids.keys(), ids.values() + 1000, lengths=ids.lengths())
        return Batch(batch.dense_features, wrong, batch.labels)


class Uncopied:
    def to(self, *_: Any, **__: Any) -> Any:
        raise MemoryError("no room on the device")


def without(data: list[Batch], number: int) -> list[Batch]:
    return [batch for place, batch in enumerate(data) if place != number]


def fails_ahead(kind: str, at: str, number: int = 3, threads: bool = True) -> tuple[list[str], dict[str, Any], int]:
    """A stage fails for one batch on the last rank: what differs from training without that batch, and the error."""
    rank, world_size = place()
    ours, plain, data = dlrm(), dlrm(), batches()
    plain_loop(plain, without(data, number))
    source = Faulty(data, number, at) if rank == world_size - 1 else iter(data)
    with getattr(pipelines, kind)(ours, dense_optimizer(ours), CPU, threads=threads) as pipeline:
        ((after, error),) = progressed(pipeline, source)[1]
    cause = None if error.__cause__ is None else type(error.__cause__).__name__
    told = {name: getattr(error, name) for name in ("stage", "batch", "rank", "why")} | {"after": after, "cause": cause}
    return same_weights(ours, plain), told, len(alive())


class Fuse(nn.Module):
    """Fails on purpose in forward, or in backward, at one batch."""

    def __init__(self, model: nn.Module, at: str, number: int) -> None:
        super().__init__()
        self.model, self.at, self.number, self.calls = model, at, number, 0

    def forward(self, batch: Batch) -> Any:
        self.calls += 1
        if self.calls - 1 != self.number:
            return self.model(batch)
        if self.at == "forward":
            raise ArithmeticError("overflow in layer 3")
        loss, output = self.model(batch)
        loss.register_hook(lambda _: 1 // 0)
        return loss, output


def fails_in_step(kind: str, at: str, only_on: int | None = None) -> tuple[str, int, int, list[str]]:
    """The model fails at batch 3: stage, batch, losses after it, threads that are left after closing."""
    model = dlrm()
    number = 3 if only_on in (None, place()[0]) else -1
    optimizer = dense_optimizer(model)
    fused = Fuse(model, at, number)
    data = iter(batches())
    with getattr(pipelines, kind)(fused, optimizer, CPU, threads=True) as pipeline:
        try:
            outputs(pipeline, data)
        except pipelines.StageError as error:
            if only_on is not None:
                raise
            stage, batch = error.stage, error.batch
        left = len(outputs(pipeline, data))
    return stage, batch, left, alive()


def uneven(kind: str, policy: str) -> tuple[int, str, list[str], int]:
    """The last rank has five batches, the others seven."""
    rank, world_size = place()
    ours, plain, data = dlrm(), dlrm(), batches(7)
    plain_loop(plain, data[:5])
    own = data[:5] if rank == world_size - 1 else data
    with getattr(pipelines, kind)(ours, dense_optimizer(ours), CPU, uneven=policy, threads=True) as pipeline:
        done, errors = progressed(pipeline, iter(own))
        dropped = pipeline.batches_dropped
    return done, str(errors[0][1]) if errors else "", same_weights(ours, plain), dropped


def nan_loss(kind: str, policy: str) -> tuple[list[str], str]:
    """Batch 2 of rank 0 has a dense feature that is not a number."""
    ours, plain, data = dlrm(), dlrm(), batches(5)
    plain_loop(plain, without(data, 2))
    if place()[0] == 0:
        data[2].dense_features[0, 0] = float("nan")
    with getattr(pipelines, kind)(ours, dense_optimizer(ours), CPU, on_nan_loss=policy, threads=True) as pipeline:
        _, errors = progressed(pipeline, iter(data))
    return same_weights(ours, plain), str(errors[-1][1]) if errors else ""


def epochs_and_short_iterators(kind: str) -> tuple[list[str], list[int]]:
    """Two epochs over one list, then iterators of one batch each, of none, and the exhausted one again."""
    ours, plain, data = dlrm(), dlrm(), batches(5)
    plain_loop(plain, [*data, *data, *data[:3]])
    counts = []
    with getattr(pipelines, kind)(ours, dense_optimizer(ours), CPU, threads=True) as pipeline:
        for _ in range(2):
            source = iter(data)
            counts.append(len(outputs(pipeline, source)))
            counts.append(len(outputs(pipeline, source)))
        for batch in data[:3]:
            pipeline.progress(iter([batch]))
        counts.append(len(outputs(pipeline, iter([]))))
    return same_weights(ours, plain), counts


def an_iterator_is_left(kind: str) -> tuple[list[str], int]:
    """Another iterator is given while batches of the first are under way: they come first."""
    ours, plain, data = dlrm(), dlrm(), batches(8)
    with getattr(pipelines, kind)(ours, dense_optimizer(ours), CPU, threads=True) as pipeline:
        first = iter(data[:5])
        for _ in range(2):
            pipeline.progress(first)
        taken = pipeline.batches_under_way
        outputs(pipeline, iter(data[5:]))
        plain_loop(plain, [*data[: 2 + taken], *data[5:]])
    return same_weights(ours, plain), taken


def _first_tables_on_rank_0() -> rl.ShardingPlan:
    table = rl.ParameterSharding("custom", shards=[rl.Shard(0, (0, 29), (0, 8))])
    entries = {f"t_{key}": table for key in KEYS[:3]}
    return rl.ShardingPlan({"model.embedding_bag_collection": rl.sharding.EmbeddingModuleShardingPlan(entries)})


def resharded(kind: str) -> list[str]:
    """The tables move while batches are under way."""
    ours, plain, data = dlrm(), dlrm(), batches()
    plan = _first_tables_on_rank_0()
    plain_loop(plain, data[:4])
    plain.reshard(plan)
    plain_loop(plain, data[4:])  # the momentum of its optimizer begins anew, as below
    with getattr(pipelines, kind)(ours, dense_optimizer(ours), CPU, threads=True) as pipeline:
        source = iter(data)
        for _ in range(4):
            pipeline.progress(source)
        ours.reshard(plan)
        pipeline._optimizer = dense_optimizer(ours)
        outputs(pipeline, source)
    return same_weights(ours, plain)


def evaluated() -> tuple[bool, list[str]]:
    ours, plain, data = dlrm(), dlrm(), batches()
    with torch.no_grad():
        expected = [float(plain(batch)[0]) for batch in data]
    with pipelines.EvalPipelineSparseDist(ours, dense_optimizer(ours), CPU, threads=True) as pipeline:
        return outputs(pipeline, iter(data)) == expected, same_weights(ours, plain)


def collectives(kind: str) -> tuple[dict[str, int], dict[str, int]]:
    """How many exchanges of which label, of the plain loop and of the pipeline."""
    from recshard_lab.comm import trace

    def counted(run: Callable[[], Any]) -> dict[str, int]:
        with trace() as sent:
            run()
        return {label: sent.count(label=label) for label in sorted({event.label for event in sent.events})}

    ours, plain, data = dlrm(), dlrm(), batches()
    one = counted(lambda: plain_loop(plain, data))
    with getattr(pipelines, kind)(ours, dense_optimizer(ours), CPU, threads=True) as pipeline:
        return one, counted(lambda: outputs(pipeline, iter(data)))


# ---- other results ----


def semi_reference(model: rl.DistributedModelParallel, data: list[Batch], start: int) -> list[float]:
    """Rows of batch i + 1 are read before batch i steps; by the unpipelined collection alone."""
    collection = model.collections["model.embedding_bag_collection"]
    optimizer, losses = dense_optimizer(model), []
    ahead: Any = None
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        if number < start:
            loss, _ = model(batch)
            loss.backward()
        else:
            with torch.no_grad():
                kt = collection(batch.sparse_features) if ahead is None else ahead
                following = data[number + 1 : number + 2]
                ahead = collection(following[0].sparse_features) if following else None
            rows = kt.values().detach().requires_grad_()
            collection.forward = lambda _, kt=kt, rows=rows: rl.KeyedTensor(kt.keys(), kt.length_per_key(), rows)
            loss, _ = model(batch)
            loss.backward()
            del collection.forward
            collection(batch.sparse_features).values().backward(rows.grad)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def semi_sync(start: int, optimizer: str, threads: bool) -> tuple[list[str], bool, list[str], bool]:
    """What differs from the reference, and what from the plain loop."""
    ours, reference, plain, data = dlrm(optimizer), dlrm(optimizer), dlrm(optimizer), batches()
    expected, ordinary = semi_reference(reference, data, max(start, 1)), plain_loop(plain, data)
    made = pipelines.TrainPipelineSemiSync(ours, dense_optimizer(ours), CPU, start_batch=start, threads=threads)
    with made as pipeline:
        losses = outputs(pipeline, iter(data))
    return same_weights(ours, reference), losses == expected, same_weights(ours, plain), losses == ordinary


def semi_sync_resharded() -> tuple[list[str], int]:
    """What differs where the tables move: rows read late by a thread, beside rows read in turn; old executors kept."""
    from recshard_lab.distributed.step.executor import Executor

    look_up, models, old = Executor.look_up, [], []

    def late(self: Executor, *arguments: Any) -> Any:
        if threading.current_thread().name == "recshard-lookup":
            time.sleep(0.05)
        return look_up(self, *arguments)

    for threads in (False, True):
        ours, source = dlrm(), iter(batches())
        old.append(weakref.ref(ours.collections["model.embedding_bag_collection"].executor))
        Executor.look_up = late
        try:
            with pipelines.TrainPipelineSemiSync(
                ours, dense_optimizer(ours), CPU, start_batch=1, threads=threads
            ) as pipeline:
                for _ in range(4):
                    pipeline.progress(source)
                ours.reshard(_first_tables_on_rank_0())
                gc.collect()
                kept = sum(executor() is not None for executor in old)
                outputs(pipeline, source)
        finally:
            Executor.look_up = look_up
        models.append(ours)
    return same_weights(*models), kept


def replicas(interval: int | None) -> list[str]:
    """Two replicas of a sharded model, brought together by the pipeline."""

    def made() -> rl.distributed.DMPCollection:
        return rl.distributed.DMPCollection(unsharded_dlrm(), "cpu", None, place()[1], 1, None, sharders=[sharder()])

    ours, plain, data = made(), made(), batches()
    optimizer = dense_optimizer(plain)
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        plain(batch)[0].backward()
        optimizer.step()
        if interval and (number + 1) % interval == 0:
            plain.sync()
    with pipelines.TrainPipelineSparseDist(
        ours, dense_optimizer(ours), CPU, dmp_collection_sync_interval_batches=interval
    ) as pipeline:
        outputs(pipeline, iter(data))
    return same_weights(ours, plain)


# ---- overlap ----


def step_ms(kind: str, message_ms: float, compute_ms: float, label: str, **options: Any) -> float:
    """Milliseconds a step of a pipeline, or of the plain loop (kind ""), where exchanges of this label take a while."""
    model, source, send = dlrm(), iter(batches(12)), input_dist.issue_all_to_all
    optimizer, taken = dense_optimizer(model), []

    def slow(*given: Any, **named: Any) -> Any:
        pending = send(*given, **named)
        if named.get("label", given[-1]).startswith(label):
            arrives = time.perf_counter() + message_ms / 1e3
            pending.work = Then(pending.work, lambda: time.sleep(max(0.0, arrives - time.perf_counter())))
        return pending

    def computed(batch: Batch) -> Any:
        time.sleep(compute_ms / 1e3)
        return model(batch)

    def plain_step(source: Iterator[Batch]) -> None:
        optimizer.zero_grad()
        computed(next(source))[0].backward()
        optimizer.step()

    with pytest.MonkeyPatch.context() as patch:
        for part in (input_dist, messages):
            patch.setattr(part, "issue_all_to_all", slow)
        options = {"custom_model_fwd": computed, "threads": True} | options
        pipeline = getattr(pipelines, kind)(model, optimizer, CPU, **options) if kind else None
        for _ in range(10):
            begun = time.perf_counter()
            plain_step(source) if pipeline is None else pipeline.progress(source)
            taken.append(1e3 * (time.perf_counter() - begun))
        if pipeline is not None:
            outputs(pipeline, source)
            pipeline.close()
    return median(taken[3:])


def stumbling(kind: str, threads: bool) -> tuple[list[str], int]:
    """Loading and computing take a random while, another one on every rank."""
    draw = random.Random(place()[0])
    ours, plain, data = dlrm(), dlrm(), batches(20)

    def slowly() -> Iterator[Batch]:
        for batch in data:
            time.sleep(draw.random() * 0.005)
            yield batch

    def computed(batch: Batch) -> Any:
        time.sleep(draw.random() * 0.005)
        return ours(batch)

    options: dict[str, Any] = {"custom_model_fwd": computed, "threads": threads}
    if kind == "TrainPipelineSemiSync":
        options["start_batch"] = 1
        semi_reference(plain, data, 1)
    else:
        plain_loop(plain, data)
    with getattr(pipelines, kind)(ours, dense_optimizer(ours), CPU, **options) as pipeline:
        steps = len(outputs(pipeline, slowly()))
    return same_weights(ours, plain), steps


# ---- on GPUs ----


def graphed() -> list[str]:
    from recshard_lab.train.launch_costs import graph_dense

    device = torch.device("cuda", torch.cuda.current_device())
    on_gpu: dict[str, Any] = {"optimizer": "exact_sgd", "device": "cuda"}
    ours, plain = dlrm(**on_gpu, init_data_parallel=False), dlrm(**on_gpu)
    data = [batch.to(device) for batch in batches()]
    graph_dense(ours, data[0])
    ours.init_data_parallel()
    plain_loop(plain, data)
    plain_loop(ours, data)
    return [
        name
        for (name, mine), theirs in zip(ours.full_state_dict().items(), plain.full_state_dict().values(), strict=True)
        if not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    ]


# ---- what cannot be sent ahead ----


class Shift(nn.Module):
    """Ids moved by a number that is part of the model's state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.zeros(1, dtype=torch.int64))

    def forward(self, ids: rl.KeyedJaggedTensor) -> rl.KeyedJaggedTensor:
        return rl.KeyedJaggedTensor(ids.keys(), (ids.values() + self.by) % 29, lengths=ids.lengths())


class Stubborn(TwoSided):
    """As `TwoSided`, with ids that cannot be had ahead for the second collection; a third is never called."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why, self.shift = why, Shift()
        self.idle = rl.EmbeddingBagCollection(tables(["a"]))

    def right_ids(self, batch: Batch) -> rl.KeyedJaggedTensor:
        ids = batch.sparse_features
        if self.why == "flow" and bool(batch.labels.sum() >= 0):
            return ids.permute([2, 3])
        if self.why == "state":
            return self.shift(ids)
        return rl.KeyedJaggedTensor(ids.keys(), torch.randint(29, (ids.values().numel(),)), lengths=ids.lengths())


def stubborn(kind: str, why: str, **switches: Any) -> tuple[list[str], dict[str, str], list[str]]:
    def made() -> rl.DistributedModelParallel:
        torch.manual_seed(4)
        return sharded(Stubborn(why), ["left", "right", "idle"])

    ours, plain, data = made(), made(), batches(4)
    differ = []
    if why != "lot":
        plain_loop(plain, data)
    with getattr(pipelines, kind)(ours, dense_optimizer(ours), CPU, **switches) as pipeline:
        outputs(pipeline, iter(data))
        report = pipeline.report()
    if why != "lot":
        differ = same_weights(ours, plain)
    return differ, report.left, report.pipelined


def taking_turns() -> tuple[list[str], bool]:
    """A training pipeline and an evaluating one on the same model, each with batches under way."""
    ours, plain, data, test = dlrm(), dlrm(), batches(6), batches(6, first=50)
    optimizer, expected, scores = dense_optimizer(plain), [], []
    for batch, other in zip(data, test, strict=True):
        optimizer.zero_grad()
        plain(batch)[0].backward()
        optimizer.step()
        with torch.no_grad():
            expected.append(float(plain(other)[0]))
    own = dense_optimizer(ours)
    with (
        pipelines.TrainPipelineSparseDist(ours, own, CPU, threads=True) as training,
        pipelines.EvalPipelineSparseDist(ours, own, CPU, threads=True) as scoring,
    ):
        first, second = iter(data), iter(test)
        for _ in data:
            training.progress(first)
            scores.append(float(scoring.progress(second)[0]))
    return same_weights(ours, plain), scores == expected


def called_otherwise() -> str:
    """The model reads another batch than the one that it is given, from the third call on."""
    model, data = dlrm(), batches()
    calls = 0

    def other(batch: Batch) -> Any:
        nonlocal calls
        calls += 1
        return model(batch if calls < 3 else data[0])

    with pipelines.TrainPipelineSparseDist(model, dense_optimizer(model), CPU, custom_model_fwd=other) as pipeline:
        try:
            outputs(pipeline, iter(data))
        except pipelines.StageError as error:
            return str(error)
    return ""
