"""Evaluation of a sequence model: at which place does it rank the held-out next item of each user?

Shape letters: b users of this rank, M items, D columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recshard_lab.arguments import checks_arguments
from recshard_lab.data.sequences import HeldOut, SequenceDataset
from recshard_lab.models import SASRec
from recshard_lab.sparse import KeyedJaggedTensor
from recshard_lab.train import metrics
from recshard_lab.train.loop import device_of, rank_in


@dataclass(frozen=True)
class NextItem:
    """How well a model ranks held-out items, all ranks' users together.

    Args:
        ndcg: NDCG@k, the mean over users.
        hit_rate: share of users whose item is among the first k.
        users: number of users.
    """

    ndcg: float
    hit_rate: float
    users: int


@checks_arguments
@torch.no_grad()
def evaluate_next_item(
    model: nn.Module,
    dataset: SequenceDataset,
    *,
    k: int = 10,
    batch_size: int = 256,
    group: dist.ProcessGroup | None = None,
) -> NextItem:
    """Ranks each user's held-out item among all items that the user has not seen.

    In a process group the ranks share the users, and every rank returns the same result.

    Args:
        model: a `SASRec`, or a `DistributedModelParallel` around one.
        k: number of places that count.
        batch_size: users of all ranks together.
        group: the ranks. Default: the default group if it is initialised, else this process alone.

    Raises:
        ValueError: a model without a `SASRec`.
    """
    rank, world_size = rank_in(group)
    device = device_of(model)
    inner = next((part for part in model.modules() if isinstance(part, SASRec)), None)
    if inner is None:
        raise ValueError(f"{type(model).__name__} contains no SASRec, which ranks items. Fix: pass a SASRec")
    was_training = model.training
    model.eval()
    every = torch.arange(dataset.num_items, device=device)
    items = inner.item_vectors(KeyedJaggedTensor([inner.features[1]], every, lengths=every.new_tensor([len(every)])))
    total = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in dataset.held_out_batches(batch_size, rank, world_size):
        users = inner.user_vectors(batch.histories.to(device))
        if len(users):
            found = rank_held_out(users @ items.T, batch, k)
            total += torch.tensor([found.ndcg, found.hit_rate, 1.0], device=device) * len(users)
    model.train(was_training)
    if world_size > 1:
        dist.all_reduce(total, group=group)
    ndcg, hits, users = total.tolist()
    return NextItem(ndcg / users, hits / users, int(users))


@checks_arguments
def rank_held_out(scores: Tensor, held_out: HeldOut, k: int = 10) -> NextItem:
    """The same for scores that you have computed: the baseline of popular items, for example.

    Args:
        scores: ``[b, M]``, one row per user; only their order counts.
        held_out: the users, as `SequenceDataset.held_out_batches` returns them.
        k: number of places that count.

    Raises:
        ValueError: scores of another number of users, or that are not finite.
    """
    if len(scores) != len(held_out.items):
        raise ValueError(f"scores has {len(scores)} rows for {len(held_out.items)} users. Fix: one row per user")
    scores = scores.float().cpu()
    user = torch.repeat_interleave(torch.arange(len(scores)), held_out.seen.lengths())
    rows = torch.arange(len(scores))
    candidates = torch.ones(scores.shape, dtype=torch.bool)
    candidates[user, held_out.seen.values()] = False
    candidates[rows, held_out.items] = True  # also if the user has had the item before
    labels = torch.zeros_like(scores)
    labels[rows, held_out.items] = 1
    groups = rows.unsqueeze(1).expand_as(scores)
    chosen = scores[candidates], labels[candidates], groups[candidates]
    return NextItem(metrics.ndcg(*chosen, k=k), metrics.recall_at_k(*chosen, k=k), len(scores))
