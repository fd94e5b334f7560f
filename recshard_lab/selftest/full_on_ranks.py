"""What ranks run for ``recshard selftest --full``. Every function is collective and returns plain numbers and text.

The truth is plain torch on every rank: an unsharded collection of `nn.EmbeddingBag` or `nn.Embedding` with a dense
optimizer, which sees the batches of all ranks. Each global batch has every row of every table, so that a dense
optimizer steps the same rows as a fused one.

*Bits* are a digest of outputs and weights: two builds with equal bits compute the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recshard_lab.comm import CommType, QCommsConfig, get_qcomm_codecs_registry
from recshard_lab.data import Batch
from recshard_lab.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    load_checkpoint,
    save_checkpoint,
)
from recshard_lab.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    EmbOptimType,
)
from recshard_lab.embedding.optimizers import (
    LAMB,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)
from recshard_lab.models import DLRM, DLRMTrain
from recshard_lab.sharding import ShardingPlan
from recshard_lab.sparse import KeyedJaggedTensor

__all__ = ["OPTIMIZERS", "SIZES", "Found", "across_plans", "dlrm_beside_truth", "tables_of", "train_beside_truth"]

SIZES = {"large": 40, "narrow": 24, "tiny": 9}
DIMS = {"large": 32, "narrow": 16, "tiny": 8}  # of bags; rows of sequences have 16 columns
SAMPLES = 6  # of each rank
RATE, EPS, ETA = 0.05, 0.01, 0.5  # a large eps: where gradients nearly cancel, Adam turns rounding into whole steps

Dense = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[EmbOptimType, Dense] = {
    EmbOptimType.EXACT_SGD: partial(torch.optim.SGD, lr=RATE),
    EmbOptimType.EXACT_ADAGRAD: partial(torch.optim.Adagrad, lr=RATE, eps=EPS),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: partial(RowWiseAdagrad, lr=RATE, eps=EPS),
    EmbOptimType.ADAM: partial(torch.optim.Adam, lr=RATE, eps=EPS),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: partial(PartialRowWiseAdam, lr=RATE, eps=EPS),
    EmbOptimType.LAMB: partial(LAMB, lr=RATE, eps=EPS),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: partial(PartialRowWiseLAMB, lr=RATE, eps=EPS),
    EmbOptimType.LARS_SGD: partial(LarsSGD, lr=RATE, momentum=0.9, eta=ETA),
}
"""Each fused optimizer's dense equal."""

Found = dict[str, Any]


def tables_of(pooled: bool) -> list[Any]:
    """Three small tables of uneven sizes; one serves two features."""
    names = {name: [name, *(["twin"] if name == "large" else [])] for name in SIZES}
    if pooled:
        return [EmbeddingBagConfig(SIZES[n], DIMS[n], name=n, feature_names=keys) for n, keys in names.items()]
    return [EmbeddingConfig(SIZES[n], 16, name=n, feature_names=keys) for n, keys in names.items()]


def train_beside_truth(plan_json: str, pooled: bool, optimizer: str, codec: str = "fp32", steps: int = 3) -> Found:
    """Trains tables under a plan, and unsharded on every rank, from the same weights on the same batches.

    Returns:
        ``outputs`` and ``weights`` (the largest difference as a share of the largest value), ``bits``, ``kernels``.
    """
    run = _Run(pooled, optimizer)
    model = run.sharded(plan_json, codec)
    for _ in range(steps):
        run.step(model)
    return run.found(model)


def across_plans(plans: Sequence[str], pooled: bool, optimizer: str, folder: str | None = None) -> Found:
    """Trains under one plan after the other, and unsharded. Weights and states of optimizers move between them.

    Args:
        plans: as JSON, in order.
        folder: where a checkpoint carries a model to the next plan. None: the running model is resharded.
    """
    run = _Run(pooled, optimizer)
    model = run.sharded(plans[0])
    run.step(model)
    for number, (_, plan) in enumerate(pairwise(plans)):
        if folder is None:
            model.reshard(ShardingPlan.from_json(plan))
        else:
            path = Path(folder) / str(number)
            save_checkpoint(path, model)
            model = run.sharded(plan)
            load_checkpoint(path, model)
        run.step(model)
    return run.found(model)


class _Run:
    """The unsharded tables, and the differences to them so far."""

    def __init__(self, pooled: bool, optimizer: str) -> None:
        self.pooled, self.optimizer = pooled, EmbOptimType(optimizer)
        self.tables = tables_of(pooled)
        self.truth = self._collection()
        self.plain = OPTIMIZERS[self.optimizer](self.truth.parameters())
        self.steps, self.apart, self.bits = 0, 0.0, hashlib.sha256()

    def _collection(self) -> nn.Module:
        found = (EmbeddingBagCollection if self.pooled else EmbeddingCollection)(self.tables)
        draw = torch.Generator().manual_seed(0)
        for weight in found.parameters():
            nn.init.uniform_(weight, -0.5, 0.5, generator=draw)
        return found

    def sharded(self, plan_json: str, codec: str = "fp32") -> DistributedModelParallel:
        """A fresh model under a plan."""
        kind = EmbeddingBagCollectionSharder if self.pooled else EmbeddingCollectionSharder
        fused = {"optimizer": self.optimizer, "learning_rate": RATE, "eps": EPS}
        if self.optimizer is EmbOptimType.LARS_SGD:
            fused |= {"momentum": 0.9, "eta": ETA}
        formats = QCommsConfig(CommType(codec), CommType(codec))
        sharder = kind(fused, get_qcomm_codecs_registry(formats))
        return DistributedModelParallel(self._collection(), plan=ShardingPlan.from_json(plan_json), sharders=[sharder])

    def step(self, model: DistributedModelParallel) -> None:
        """One step of both on the next batch."""
        rank, world_size = model.env.rank, model.env.world_size
        batches = [_batch(self.tables, self.steps, rank, world_size) for rank in range(world_size)]
        output = _values(model(batches[rank].to(model.device)))
        output.square().sum().backward()
        expected = [_values(self.truth(batch)) for batch in batches]
        self.plain.zero_grad()
        torch.stack([one.square().sum() for one in expected]).mean().backward()  # as ranks average gradients
        self.plain.step()
        self.apart = max(self.apart, _apart(output.detach().cpu(), expected[rank].detach()))
        _digest(self.bits, output.detach())
        self.steps += 1

    def found(self, model: DistributedModelParallel) -> Found:
        """The differences so far, and those of the weights now."""
        return _found(model, self.truth, self.apart, self.bits)


def _found(model: DistributedModelParallel, truth: nn.Module, outputs: float, bits: Any) -> Found:
    whole, expected = model.full_state_dict(cpu_offload=True), truth.state_dict()
    weights = max(_apart(whole[name], value) for name, value in expected.items())
    for name in sorted(expected):
        _digest(bits, whole[name])
    kernels = sorted(set(model.backends().values()))
    return {"outputs": outputs, "weights": weights, "bits": bits.hexdigest(), "kernels": kernels}


PATH = "model.embedding_bag_collection"


def model_tables() -> list[EmbeddingBagConfig]:
    """The tables of the model; its collection is at `PATH`."""
    return [EmbeddingBagConfig(rows, 16, name=name, feature_names=[name]) for name, rows in SIZES.items()]


def dlrm_beside_truth(plan_json: str, steps: int = 4) -> Found:
    """A DLRM with its tables under a plan and its dense part on every rank, beside a plain one."""
    tables = model_tables()

    def make() -> DLRMTrain:
        torch.manual_seed(0)
        return DLRMTrain(DLRM(EmbeddingBagCollection(tables), 4, [16, 16], [16, 1]))

    truth = make()
    fused = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": RATE, "eps": EPS}
    sharder = EmbeddingBagCollectionSharder(fused)
    model = DistributedModelParallel(make(), plan=ShardingPlan.from_json(plan_json), sharders=[sharder])
    dense = torch.optim.Adagrad(model.dense_parameters(), lr=RATE, eps=EPS)
    plain = torch.optim.Adagrad(truth.parameters(), lr=RATE, eps=EPS)
    rank, world_size = model.env.rank, model.env.world_size
    apart, bits = 0.0, hashlib.sha256()
    for number in range(steps):
        batches = [_dlrm_batch(tables, number, rank, world_size) for rank in range(world_size)]
        dense.zero_grad()
        loss = model(batches[rank].to(model.device))[0]
        loss.backward()
        dense.step()
        losses = [truth(batch)[0] for batch in batches]
        plain.zero_grad()
        torch.stack(losses).mean().backward()
        plain.step()
        apart = max(apart, _apart(loss.detach().cpu(), losses[rank].detach()))
        _digest(bits, loss.detach())
    return _found(model, truth, apart, bits)


def _dlrm_batch(tables: Sequence[Any], number: int, rank: int, world_size: int) -> Batch:
    rng = np.random.default_rng([number, rank])
    dense = torch.from_numpy(rng.random((SAMPLES, 4), dtype=np.float32))
    labels = torch.from_numpy(rng.integers(0, 2, SAMPLES))
    return Batch(dense, _batch(tables, number, rank, world_size), labels)


def _batch(tables: Sequence[Any], number: int, rank: int, world_size: int) -> KeyedJaggedTensor:
    """A rank's batch of a step: bags of up to four ids, some empty. One rank's last bags have every row."""
    rng = np.random.default_rng([11, number, rank])
    keys, values, lengths = [], [], []
    for table in tables:
        for key in table.feature_names:
            bags = [rng.integers(0, table.num_embeddings, rng.integers(0, 5)) for _ in range(SAMPLES)]
            if number % world_size == rank:
                bags[-1] = rng.permutation(table.num_embeddings)
            keys.append(key)
            values += bags
            lengths += [len(bag) for bag in bags]
    return KeyedJaggedTensor(keys, torch.from_numpy(np.concatenate(values)), lengths=torch.tensor(lengths))


def _values(output: Any) -> Tensor:
    """All rows of an output in one vector."""
    if hasattr(output, "wait"):
        output = output.wait()
    parts = [part.values() for part in output.values()] if isinstance(output, dict) else [output.values()]
    return torch.cat([part.reshape(-1) for part in parts])


def _apart(one: Tensor, other: Tensor) -> float:
    """The largest difference as a share of the largest value; infinite where a value is not a number."""
    apart = float((one - other).abs().max() / other.abs().max().clamp(min=1e-3))
    return apart if apart == apart else float("inf")


def _digest(bits: Any, tensor: Tensor) -> None:
    bits.update(tensor.cpu().contiguous().numpy().tobytes())
