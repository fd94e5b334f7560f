"""Towers on ranks, beside the unsharded towers on one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from recshard_lab.comm import ShardingEnv, trace
from recshard_lab.distributed import (
    DefaultDataParallelWrapper,
    DMPCollection,
    EmbeddingTowerCollectionSharder,
    EmbeddingTowerSharder,
    FullyShardWrapper,
    get_default_sharders,
    load_checkpoint,
    save_checkpoint,
)
from recshard_lab.models import EmbeddingTower, EmbeddingTowerCollection
from recshard_lab.planner import EmbeddingShardingPlanner
from recshard_lab.serving import shard_for_inference
from recshard_lab.sharding import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    Shard,
    ShardingPlan,
    Topology,
    construct_module_sharding_plan,
    table_row_wise,
)
from recshard_lab.train import TrainPipelineSparseDist

STEPS, LR = 3, 0.1
OPTIMIZERS = {"exact_sgd": torch.optim.SGD, "exact_adagrad": torch.optim.Adagrad}


class Pooled(nn.Module):
    """Reads the values of a KeyedTensor, one column of which stays unused."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(width, out), nn.Linear(2, 2)

    def forward(self, pooled: Any) -> Tensor:
        return torch.tanh(self.linear(pooled.values()))


class Summed(nn.Module):
    """Reads sequences: the sum of each sample's rows."""

    def __init__(self, feature: str, width: int, out: int) -> None:
        super().__init__()
        self.feature, self.linear = feature, nn.Linear(width, out)

    def forward(self, rows: Any) -> Tensor:
        own = rows[self.feature]
        total = own.values().new_zeros(own.lengths().numel(), own.values().shape[1])
        samples = torch.arange(own.lengths().numel()).repeat_interleave(own.lengths())
        return self.linear(total.index_add(0, samples, own.values()))


def bags(*names: str, weighted: bool = False) -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(name=n, num_embeddings=12, embedding_dim=8, feature_names=[f"f_{n}"]) for n in names]
    return EmbeddingBagCollection(tables, is_weighted=weighted)


def sequences(*names: str) -> EmbeddingCollection:
    tables = [EmbeddingConfig(name=n, num_embeddings=12, embedding_dim=8, feature_names=[f"f_{n}"]) for n in names]
    return EmbeddingCollection(tables)


class Model(nn.Module):
    """Towers over bags, weighted bags and sequences, then a tower that uses a layer twice, then a dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = EmbeddingTowerCollection(
            [
                EmbeddingTower(bags("a", "b"), Pooled(16, 3)),
                EmbeddingTower(bags("c", weighted=True), Pooled(8, 2)),
                EmbeddingTower(sequences("d"), Summed("f_d", 8, 4)),
            ]
        )
        twice = nn.Linear(5, 5)
        self.alone = EmbeddingTower(bags("e"), nn.Sequential(Pooled(8, 5), nn.BatchNorm1d(5), twice, twice))
        self.over = nn.Linear(14, 1)

    def forward(self, plain: KeyedJaggedTensor, weighted: KeyedJaggedTensor) -> Tensor:
        return self.over(torch.cat([self.towers(plain, weighted), self.alone(plain)], 1)).squeeze(1)


def model() -> Model:
    torch.manual_seed(5)
    return Model()


def batch(step: int, rank: int) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """Batches of 3 or 4 samples; the plain one has its keys in another order than the tables."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    samples, found = 3 + (step + rank) % 2, []
    for keys, weighted in ((["f_e", "f_d", "f_b", "f_a"], False), (["f_c"], True)):
        lengths = torch.randint(0, 3, (len(keys) * samples,), generator=draw)
        count = int(lengths.sum())
        ids = torch.randint(0, 12, (count,), generator=draw)
        weights = torch.rand(count, generator=draw) if weighted else None
        found.append(KeyedJaggedTensor(keys, ids, weights, lengths=lengths))
    return found[0], found[1]


def joined(step: int, world_size: int) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """The batches of all ranks as one."""
    parts = [batch(step, rank) for rank in range(world_size)]
    found = []
    for own in zip(*parts, strict=True):
        keys = own[0].keys()
        of_key = [[kjt[key] for kjt in own] for key in keys]
        values = torch.cat([jt.values() for jts in of_key for jt in jts])
        lengths = torch.cat([jt.lengths() for jts in of_key for jt in jts])
        heavy = own[0].weights_or_none() is not None
        weights = torch.cat([jt.weights() for jts in of_key for jt in jts]) if heavy else None
        found.append(KeyedJaggedTensor(keys, values, weights, lengths=lengths))
    return found[0], found[1]


def freeze_norm(of: nn.Module) -> None:
    """Ranks have statistics of their own samples, so batch norm runs in evaluation mode."""
    for part in of.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.eval()


def unsharded(world_size: int, optimizer: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs of each step, and the weights after the last one."""
    truth, outputs = model(), []
    freeze_norm(truth)
    stepper = OPTIMIZERS[optimizer](truth.parameters(), lr=LR)
    for step in range(STEPS):
        stepper.zero_grad()
        out = truth(*joined(step, world_size))
        outputs.append(out.detach())
        sizes = [batch(step, rank)[0].stride() for rank in range(world_size)]
        (sum(part.square().mean() for part in out.split(sizes)) / world_size).backward()
        stepper.step()
    return outputs, truth.state_dict()


def on_node(node: int, local: int, columns: bool = False) -> ParameterSharding:
    """A table ``[12, 8]`` over the ranks of a node."""
    size = (8 if columns else 12) // local
    shards = []
    for n in range(local):
        span = (n * size, (n + 1) * size)
        shards.append(Shard(node * local + n, (0, 12) if columns else span, span if columns else (0, 8)))
    scheme = "table_column_wise" if columns else "table_row_wise"
    return ParameterSharding(scheme, ranks=[own.rank for own in shards], shards=shards)


def plan(nodes: int, local: int) -> ShardingPlan:
    """Towers on different nodes, with TorchRec's paths."""
    last = nodes - 1
    towers = {name: on_node(0 if name == "c" else last, local, columns=name == "b") for name in "abcd"}
    return ShardingPlan(
        {
            "towers": EmbeddingModuleShardingPlan(towers),
            "alone": EmbeddingModuleShardingPlan({"e": on_node(last, local)}),
        }
    )


def sharders(optimizer: str = "exact_sgd") -> list[Any]:
    fused = {"optimizer": optimizer, "learning_rate": LR, "eps": 1e-10}
    return [EmbeddingTowerCollectionSharder(fused), EmbeddingTowerSharder(fused)]


def env_of(local: int) -> ShardingEnv:
    whole = ShardingEnv.default()
    return ShardingEnv(whole.world_size, whole.rank, whole.pg, local_size=local)


def trained(local: int, optimizer: str, by_planner: bool = False) -> tuple[list[Tensor], dict[str, Tensor], list[str]]:
    """This rank's outputs, the full state dict, and the names of the local one."""
    env = env_of(local)
    own = None if by_planner else plan(env.world_size // local, local)
    dmp = DistributedModelParallel(model(), env, plan=own, sharders=sharders(optimizer) + get_default_sharders())
    freeze_norm(dmp)
    outputs = []
    stepper = OPTIMIZERS[optimizer](dmp.dense_parameters(), lr=LR)
    for step in range(STEPS):
        stepper.zero_grad()
        out = dmp(*batch(step, env.rank))
        outputs.append(out.detach())
        out.square().mean().backward()
        stepper.step()
    return outputs, dmp.full_state_dict(), list(dmp.state_dict())


def planned(nodes: int, local: int) -> dict[str, dict[str, tuple[str, list[int]]]]:
    """The planner's plan: path -> table -> scheme and ranks."""
    topology = Topology(nodes * local, "cpu", local_world_size=local)
    found = EmbeddingShardingPlanner(topology).plan(model(), [*sharders(), *get_default_sharders()])
    return {
        path: {name: (str(own.sharding_type), sorted({s.rank for s in own.shards})) for name, own in tables.items()}
        for path, tables in found.plan.items()
    }


def trained_by_planner(local: int) -> tuple[list[Tensor], dict[str, Tensor], list[str]]:
    """As `trained`, with the planner's plan and TorchRec's default sharders beside those of towers."""
    return trained(local, "exact_sgd", by_planner=True)


def standalone(local: int) -> tuple[Tensor, Tensor, dict[str, Tensor], list[str], list[str]]:
    """A tower without DistributedModelParallel, stage by stage: output, another rank's weight, gradients and names."""
    env = env_of(local)
    torch.manual_seed(7 + env.rank)  # rank 0's weights are those of all
    tower = EmbeddingTower(bags("a", "b"), Pooled(16, 3))
    node = env.world_size // local - 1
    sharder = EmbeddingTowerSharder({"learning_rate": LR})
    generators = {name: table_row_wise(host_index=node) for name in "ab"}
    own = construct_module_sharding_plan(tower, generators, sharder, local, env.world_size, "cpu")
    module = sharder.shard(tower, own, env)
    for group in module.fused_optimizer.param_groups:
        group["lr"] = 2 * LR
    features = batch(0, env.rank)[0]
    ctx = module.create_context()
    ids = module.input_dist(ctx, features).wait().wait()
    out = module.output_dist(ctx, module.compute(ctx, ids)).wait()
    out.sum().backward()
    grads = {name: p.grad for name, p in module.interaction.named_parameters() if p.grad is not None}
    with torch.no_grad():
        after = module(features)
    return out.detach(), after, grads, list(module.state_dict()), list(module.sharded_parameter_names("m"))


def standalone_truth(world_size: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The same in one process."""
    torch.manual_seed(7)
    tower = EmbeddingTower(bags("a", "b"), Pooled(16, 3))
    features = joined(0, world_size)[0]
    out = tower(features)
    (out.sum() / world_size).backward()
    with torch.no_grad():
        for p in tower.embedding.parameters():
            p -= 2 * LR * p.grad
        after = tower(features)
    return out.detach(), after, {n: p.grad for n, p in tower.interaction.named_parameters() if p.grad is not None}


class Shaped(nn.Module):
    """Returns rows of another shape for each sample."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, pooled: Any) -> Tensor:
        values: Tensor = pooled.values()
        return values[:, 0] if not self.shape else values.view(-1, *self.shape)


def shaped(local: int) -> list[tuple[Tensor, Tensor]]:
    """Sharded and unsharded outputs with no and with two dimensions after the batch; ranks without samples too."""
    env, found = env_of(local), []
    none = torch.tensor([], dtype=torch.int64)
    features = batch(0, env.rank)[0] if env.rank else KeyedJaggedTensor(["f_a"], none, lengths=none)
    for shape in ((), (2, 4)):
        torch.manual_seed(1)
        tower = EmbeddingTower(bags("a"), Shaped(*shape))
        own = {"a": on_node(env.world_size // local - 1, local)}
        expected = tower(features).detach()
        found.append((EmbeddingTowerSharder().shard(tower, own, env)(features).detach(), expected))
    return found


class Whole(nn.Module):
    """Returns whole numbers."""

    def forward(self, pooled: Any) -> Tensor:
        values: Tensor = pooled.values()
        return values.round().long()


class Flat(nn.Module):
    """Returns an output without a dimension of samples."""

    def forward(self, pooled: Any) -> Tensor:
        values: Tensor = pooled.values()
        return values.flatten()


class Failing(nn.Module):
    """Raises in its second forward on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, pooled: Any) -> Tensor:
        self.calls += 1
        if self.calls == 2 and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            raise KeyError("interaction failed")
        values: Tensor = pooled.values()
        return values


def errors(local: int) -> dict[str, str]:
    """Wrong plans, batches and interactions, and what each rank raises."""
    env, found = env_of(local), {}

    def tried(name: str, action: Any) -> None:
        try:
            action()
            found[name] = "nothing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    def sharded(interaction: nn.Module | None = None) -> Any:
        tower = EmbeddingTower(bags("a"), interaction or Pooled(8, 3))
        return DistributedModelParallel(
            tower, env, plan=ShardingPlan({"": {"a": on_node(env.world_size // local - 1, local)}}), sharders=sharders()
        )

    rows = [Shard(0, (0, 6), (0, 8)), Shard(env.world_size - 1, (6, 12), (0, 8))]
    apart = ShardingPlan({"": {"a": ParameterSharding("custom", shards=rows)}})
    tower = EmbeddingTower(bags("a"), Pooled(8, 3))
    tried("apart", lambda: DistributedModelParallel(tower, env, plan=apart, sharders=sharders()))
    some = ShardingPlan({"towers": {"c": on_node(0, local)}})
    tried("some towers", lambda: DistributedModelParallel(model(), env, plan=some, sharders=sharders()))
    unknown = ShardingPlan({"towers": {"x": on_node(0, local)}})
    tried("unknown", lambda: DistributedModelParallel(model(), env, plan=unknown, sharders=sharders()))
    dmp = sharded()
    embedding = ShardingPlan({"embedding": apart.plan[""]})
    tried("reshard apart", lambda: dmp.reshard(embedding))
    missing = KeyedJaggedTensor(["x"], torch.tensor([1]), lengths=torch.tensor([1]))
    good = KeyedJaggedTensor(["f_a"], torch.tensor([1]), lengths=torch.tensor([1]))
    tried("missing on rank 0", lambda: dmp(missing if env.rank == 0 else good))
    tried("two batches", lambda: dmp(good, good))
    variable = KeyedJaggedTensor(
        ["f_a"], torch.tensor([1]), lengths=torch.tensor([1]), stride_per_key_per_rank=[[1]],
        inverse_indices=(["f_a"], torch.tensor([[0, 0]])),
    )  # fmt: skip
    tried("variable", lambda: dmp(variable))
    tried("another dtype", lambda: sharded(Whole())(good))
    tried("another shape", lambda: sharded(Flat())(good))
    tried("good afterwards", lambda: dmp(good).sum().backward())
    failing = sharded(Failing())
    failing(good)
    tried("second forward", lambda: failing(good))
    return found


def moved(local: int) -> list[Tensor]:
    """Outputs before the tower moves to the other node, and after; gradients in between."""
    env = env_of(local)
    dmp = DistributedModelParallel(model(), env, plan=plan(env.world_size // local, local), sharders=sharders())
    freeze_norm(dmp)
    outputs = [dmp(*batch(0, env.rank)).detach()]
    first = on_node(0, local)
    dmp.reshard(ShardingPlan({"alone.embedding": {"e": first}, "towers.towers.2.embedding": {"d": first}}))
    outputs.append(dmp(*batch(0, env.rank)).detach())
    dmp(*batch(1, env.rank)).square().mean().backward()
    return [*outputs, dmp(*batch(0, env.rank)).detach()]


def saved(local: int, folder: str) -> list[float]:
    """Largest differences after a checkpoint was loaded: into the same model, and into a copy."""
    env = env_of(local)
    dmp = DistributedModelParallel(model(), env, plan=plan(env.world_size // local, local), sharders=sharders())
    stepper = torch.optim.SGD(dmp.dense_parameters(), lr=LR)
    freeze_norm(dmp)

    def step() -> Tensor:
        stepper.zero_grad()
        out = dmp(*batch(0, env.rank))
        out.square().mean().backward()
        stepper.step()
        return out.detach()

    step()
    save_checkpoint(folder, dmp, stepper)
    expected = step()
    step()
    load_checkpoint(folder, dmp, stepper)
    again = dmp(*batch(0, env.rank)).detach()
    twin = dmp.copy("cpu")
    freeze_norm(twin)
    return [float((own - expected).abs().max()) for own in (again, twin(*batch(0, env.rank)).detach())]


def buffers(local: int) -> dict[str, Tensor]:
    """The running statistics of the interaction on this rank, after a step in training mode."""
    env = env_of(local)
    dmp = DistributedModelParallel(model(), env, plan=plan(env.world_size // local, local), sharders=sharders())
    for step in range(2):
        dmp(*batch(step, env.rank)).sum().backward()
    return {name: value.clone() for name, value in dmp.module.named_buffers()}


def wrapped(local: int, kind: str) -> list[Tensor]:
    """Outputs of two steps with another way to replicate the dense part."""
    env = env_of(local)
    wrappers = {
        "fully shard": FullyShardWrapper(modules=[nn.Linear]),
        "static graph": DefaultDataParallelWrapper(static_graph=True),
    }
    dmp = DistributedModelParallel(
        model(),
        env,
        plan=plan(env.world_size // local, local),
        sharders=sharders(),
        data_parallel_wrapper=wrappers[kind],
    )
    freeze_norm(dmp)
    stepper, outputs = torch.optim.SGD(dmp.dense_parameters(), lr=LR), []
    for step in range(STEPS):
        stepper.zero_grad()
        out = dmp(*batch(step, env.rank))
        outputs.append(out.detach())
        out.square().mean().backward()
        stepper.step()
    return outputs


def pipelined(local: int) -> tuple[list[Tensor], str]:
    """Outputs of a pipeline, and its report."""
    env = env_of(local)
    below = ShardingPlan({f"model.{p}": own for p, own in plan(env.world_size // local, local).plan.items()})
    dmp = DistributedModelParallel(WithLoss(model()), env, plan=below, sharders=sharders())
    freeze_norm(dmp)
    stepper = torch.optim.SGD(dmp.dense_parameters(), lr=LR)
    pipeline = TrainPipelineSparseDist(dmp, stepper, torch.device("cpu"))
    batches, outputs = iter([Both(*batch(step, env.rank)) for step in range(STEPS)]), []
    for _ in range(STEPS):
        outputs.append(pipeline.progress(batches).detach())
    return outputs, str(pipeline.report())


@dataclass
class Both:
    """A batch as pipelines move it."""

    plain: KeyedJaggedTensor
    weighted: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Both:
        return Both(self.plain.to(device), self.weighted.to(device))

    def record_stream(self, stream: Any) -> None:
        self.plain.record_stream(stream)


class WithLoss(nn.Module):
    """Loss and output of a batch."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.model = of

    def forward(self, batch: Both) -> tuple[Tensor, Tensor]:
        out = self.model(batch.plain, batch.weighted)
        return out.square().mean(), out


def two_dimensional() -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs of steps on two replicas of one rank each, and the weights after the replicas were averaged."""
    env = ShardingEnv.default()
    dmp = DMPCollection(model(), torch.device("cpu"), plan(1, 1), env.world_size, 1, env.pg, sharders=sharders())
    freeze_norm(dmp)
    stepper, outputs = torch.optim.SGD(dmp.dense_parameters(), lr=LR), []
    for step in range(STEPS):
        stepper.zero_grad()
        out = dmp(*batch(step, env.rank))
        outputs.append(out.detach())
        out.square().mean().backward()
        stepper.step()
        dmp.sync()
    return outputs, dmp.full_state_dict()


def served(local: int) -> tuple[Tensor, Tensor]:
    """Outputs of a sharded model, and of its form for inference over the same ranks."""
    env = env_of(local)
    dmp = DistributedModelParallel(model(), env, plan=plan(env.world_size // local, local), sharders=sharders())
    dmp.eval()
    with torch.no_grad():
        expected = dmp(*batch(0, env.rank))
    return expected, shard_for_inference(dmp)(*batch(0, env.rank))


def messages(local: int) -> dict[str, int]:
    """Bytes that this rank sent to another node in a forward, by label."""
    env = env_of(local)
    dmp = DistributedModelParallel(model(), env, plan=plan(env.world_size // local, local), sharders=sharders())
    dmp.eval()
    with torch.no_grad():
        dmp(*batch(0, env.rank))
        with trace() as seen:
            dmp(*batch(1, env.rank))
    return {event.label: seen.inter_node_bytes(event.label) for event in seen.events}
