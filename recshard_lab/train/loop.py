"""The plain training loop and the evaluation, for one process and for the ranks of a group.

Shape letters: n samples of a dataset, b samples of this rank in one step, B of all ranks, W ranks.

The loss of a step is the mean over the *global* batch. Gradients are averaged over ranks (by DDP for the dense
part, by the sharded tables for theirs). Each rank contributes  sum over its b samples x W / B , so the average is
the mean over B, for parts of any size, also empty ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from recshard_lab.arguments import checks_arguments, device_named
from recshard_lab.data import Batch, RatingsDataset, SequenceDataset, rank_slice
from recshard_lab.train import metrics

_MOST_EPOCHS = 1 << 31


@dataclass(frozen=True)
class Step:
    """The argument of `on_step`: `loss` is this rank's part, a tensor on its device."""

    number: int
    total: int
    epoch: int
    loss: Tensor
    samples: int


@dataclass(frozen=True)
class TrainResult:
    """The course of a training run.

    Args:
        losses: mean loss of each step's global batch, the same list on every rank.
        seconds: wall clock of all steps, without evaluation and start-up.
        samples: samples of all ranks.
    """

    losses: list[float] = field(repr=False)
    seconds: float
    samples: int

    @property
    def samples_per_second(self) -> float:
        """Of all ranks together."""
        return self.samples / self.seconds if self.seconds else 0.0

    def curve(self, points: int = 100) -> list[tuple[float, float]]:
        """(step, mean loss) over at most this many equal intervals: a smoothed curve.

        >>> TrainResult([4.0, 2.0, 1.0, 1.0], 1.0, 8).curve(2)
        [(0.5, 3.0), (2.5, 1.0)]
        """
        pieces = min(points, len(self.losses))
        spans = [rank_slice(len(self.losses), piece, pieces) for piece in range(pieces)]
        return [((a + b - 1) / 2, sum(self.losses[a:b]) / (b - a)) for a, b in spans]


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a model on a dataset, of all ranks' samples together.

    Args:
        auc, log_loss, normalized_entropy: of all n samples.
        scores: logits ``[n]`` in the dataset's order.
    """

    auc: float
    log_loss: float
    normalized_entropy: float
    scores: Tensor = field(repr=False)


def batch_loss(logits: Tensor, batch: Batch) -> Tensor:
    """This rank's part of the loss; averaged over ranks it is the mean over the global batch.

    Args:
        logits: ``[b, 1]`` or ``[b]``.
    """
    total = binary_cross_entropy_with_logits(logits.flatten(), batch.labels.float(), reduction="sum")
    return total * (batch.world_size / batch.global_size)


@checks_arguments
def train_epochs(
    model: nn.Module,
    dataset: RatingsDataset | SequenceDataset,
    optimizer: torch.optim.Optimizer | None,
    *,
    epochs: int = 1,
    batch_size: int = 512,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    on_step: Callable[[Step], object] | None = None,
) -> TrainResult:
    """Trains in place. In a process group, each rank trains on its part of every global batch.

    Args:
        model: ``model(dense_features, sparse_features) -> logits [b, 1]``; sharded or not.
        optimizer: of the dense parameters. Tables with an optimizer fused into backward need none. None if all
            parameters are in such tables.
        batch_size: B, of all ranks together: the same steps on any number of ranks.
        seed: of the order of samples; epoch e is shuffled by ``seed + e``.
        device: device of the batches. Default: the model's.
        group: the ranks that train together. Default: the default group, if one is initialised.
        on_step: called after each step with a `Step`.

    Raises:
        ValueError: the dataset has no batch.
    """
    if not 0 <= epochs < _MOST_EPOCHS:
        raise ValueError(f"epochs must be in [0, {_MOST_EPOCHS:,}), got {epochs:,}")
    rank, world_size = rank_in(group)
    device = device_of(model) if device is None else device_named(device)
    per_epoch = dataset.num_batches(batch_size, drop_last)
    if per_epoch * epochs == 0:
        raise ValueError(f"nothing to train on: {len(dataset):,} samples in batches of {batch_size}, {epochs} epochs")
    model.train()
    losses: list[Tensor] = []
    samples = 0
    begun = time.perf_counter()
    for epoch in range(epochs):
        for batch in dataset.batches(batch_size, rank, world_size, shuffle, seed + epoch, drop_last):
            batch = batch.to(device)
            loss = batch_loss(model(batch.dense_features, batch.sparse_features), batch)
            if optimizer is not None:
                optimizer.zero_grad()
            loss.backward()
            if optimizer is not None:
                optimizer.step()
            losses.append(loss.detach())
            samples += batch.global_size
            if on_step is not None:
                on_step(Step(len(losses), per_epoch * epochs, epoch, losses[-1], batch.global_size))
    parts = torch.stack(losses).double()
    seconds = time.perf_counter() - begun  # stacking waited for the device
    if world_size > 1:
        dist.all_reduce(parts, group=group)
    return TrainResult((parts / world_size).tolist(), seconds, samples)


@checks_arguments
@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: RatingsDataset,
    *,
    batch_size: int = 4096,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> Evaluation:
    """Scores every sample once, split over the ranks, and computes the metrics of all of them.

    Each rank writes its samples' scores into a vector ``[n]`` of zeros. The sum over ranks has the scores in the
    dataset's order, exactly, on any number of ranks.

    Args:
        model, device, group: as in `train_epochs`.
        batch_size: of all ranks together.
    """
    rank, world_size = rank_in(group)
    device = device_of(model) if device is None else device_named(device)
    was_training = model.training
    model.eval()
    scores = torch.zeros(len(dataset), device=device)
    done = 0
    for batch in dataset.batches(batch_size, rank, world_size):
        batch = batch.to(device)
        begin, end = rank_slice(batch.global_size, rank, world_size)
        logits = model(batch.dense_features, batch.sparse_features)
        scores[done + begin : done + end] = logits.flatten().float()
        done += batch.global_size
    model.train(was_training)
    if world_size > 1:
        dist.all_reduce(scores, group=group)
    scores = scores.cpu()
    return Evaluation(
        auc=metrics.auc(scores, dataset.label),
        log_loss=metrics.log_loss(scores, dataset.label),
        normalized_entropy=metrics.normalized_entropy(scores, dataset.label),
        scores=scores,
    )


def rank_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(rank, world size); (0, 1) without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def device_of(model: nn.Module) -> torch.device:
    """Device of the model's first parameter; the CPU if it has none."""
    for parameter in model.parameters():
        return parameter.device
    return torch.device("cpu")
