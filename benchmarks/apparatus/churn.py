"""AUC of a dynamic table whose users leave and never come back, with a quarter of the rows, by eviction policy.

The planted clicks of `ChurningClicks`: 20,000 live users, of which 1% are replaced per 100,000 samples, and three
features that stay. A DLRM trains once over the samples, in order, with fused row-wise Adagrad of dim 64. Every batch is
predicted before it is trained on. The AUC is that of the last 30% of these predictions. All policies see the same
batches and begin with the same weights. Only the users' table has a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import Figure, note
from recshard_lab.data import Batch, ChurningClicks
from recshard_lab.embedding import DynamicEmbeddingBagCollection, DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.admission import uniform
from recshard_lab.embedding.dynamic.config import slots_for
from recshard_lab.models import DLRM
from recshard_lab.optim import RowWiseAdagrad
from recshard_lab.train.metrics.functions import auc

LIVE = [20_000, 10_000, 1000, 100]  # users first
DENSE, DIM, BATCH, STEPS = 4, 64, 2048, 1000
SHARE = 0.25  # of the rows of the table without a limit
TEST_FROM, BLOCKS = 0.7, 20
EPOCH_STEPS = 244  # half a million samples
USERS = "cat_0"
BEST = f"AUC lost by the best policy, {SHARE:.0%} of the rows, churning users"


class DecayedCounts:
    """A score for ``evict=``: how often an id occurred, where an occurrence counts half after some batches.

    The counts are a count-min sketch (Cormode and Muthukrishnan 2005), which also counts ids without a row. Weights
    grow with time instead of shrinking (forward decay, Cormode et al. 2009), so that scores never need an update.

    Args:
        width: counters of each of 4 lines.
        half: batches after which an occurrence counts half.

    >>> score = DecayedCounts(1000, half=5)
    >>> first = score(torch.tensor([7, 7, -3]))
    >>> bool(first[0] > first[2]), bool(score(torch.tensor([8])) > first[2])
    (True, True)
    """

    def __init__(self, width: int, half: float) -> None:
        self.half, self.batch, self.doubled = half, 0, 0.0
        self.counts = torch.zeros(4, width)

    def __call__(self, ids: Tensor) -> Tensor:
        """``[N]`` int64 scores of ids ``[N]``, this batch included."""
        self.batch += 1
        weight = 2.0 ** (self.batch / self.half - self.doubled)
        if weight > 1e6:
            self.counts /= weight
            self.doubled, weight = self.batch / self.half, 1.0
        width = self.counts.shape[1]
        places = [(uniform(ids, line, (0, 1)).squeeze(1) * width).long().clamp_(max=width - 1) for line in range(4)]
        added = torch.full((len(ids),), weight)
        for line, at in zip(self.counts, places, strict=True):
            line.index_add_(0, at, added)
        lowest = torch.stack([line[at] for line, at in zip(self.counts, places, strict=True)]).amin(0)
        return ((lowest.log2() + self.doubled) * (1 << 20)).long()


@dataclass(frozen=True)
class Policy:
    """One run: what the users' table evicts and admits. ``rows`` of None is no limit."""

    evict: str | Callable[[Tensor], Tensor] = "lru"
    admit: Any = None


def policies(rows: int) -> dict[str, Policy]:
    """Each policy by name, for a table of so many rows."""
    return {
        "lru": Policy("lru"),
        "lfu": Policy("lfu"),
        "epoch_lru": Policy("epoch_lru"),
        "epoch_lfu": Policy("epoch_lfu"),
        "decayed counts (a custom score)": Policy(DecayedCounts(2 * rows, half=EPOCH_STEPS)),
        "lru, admitted at the 2nd occurrence": Policy("lru", 2),
        "lfu, admitted at the 2nd occurrence": Policy("lfu", 2),
        "lfu, admitted with probability 0.2": Policy("lfu", 0.2),
        "epoch_lfu, admitted at the 2nd occurrence": Policy("epoch_lfu", 2),
        "no user has a row": Policy("lru", lambda ids: torch.zeros_like(ids, dtype=torch.bool)),
    }


def churn_figures(steps: int = STEPS, seed: int = 0) -> Iterator[Figure]:
    """The AUC that each policy loses against a table without a limit, and that of the best one.

    The standard error is of the mean over 20 blocks of the test samples.
    """
    clicks = ChurningClicks(steps * BATCH, LIVE, num_dense=DENSE, seed=seed)
    batches = [clicks.batch(range(at, at + BATCH)) for at in range(0, steps * BATCH, BATCH)]
    labels = torch.cat([batch.labels for batch in batches])
    distinct = torch.cat([batch.sparse_features[USERS].values() for batch in batches]).unique().numel()
    rows = int(SHARE * distinct)
    while slots_for(rows, rows) > SHARE * distinct:
        rows -= 1
    first = int(TEST_FROM * len(labels))
    unbounded = _auc_by_block(_train(batches, Policy(), 2 * distinct)[0], labels, first)
    found: dict[str, float] = {}
    for name, policy in policies(rows).items():
        note(f"{name} ...")
        logits, table = _train(batches, policy, rows)
        lost = unbounded - _auc_by_block(logits, labels, first)
        error = float(lost.std() / BLOCKS**0.5)
        counters = table.counters
        beside = {"standard error": error, "hits %": 100 * counters.hits / counters.lookups, "rows": table.capacity}
        yield Figure(f"AUC lost: {name}", float(lost.mean()), "", beside=beside)
        found[name] = float(lost.mean())
    best = min(found, key=lambda name: found[name])
    reached, most = float(unbounded.mean()), clicks.best(range(first, len(labels))).auc
    words = f"AUC lost: below the same model with a row for each of {distinct:,} users. Its AUC is {reached:.4f}."
    about = f"No model is expected to pass {most:.4f}. The best policy is {best}."
    yield Figure(BEST, found[best], "", note=f"{words} {about}")


def _auc_by_block(logits: Tensor, labels: Tensor, first: int) -> Tensor:
    """``[BLOCKS]`` the AUC of each block of the samples from ``first`` on."""
    pairs = zip(logits[first:].tensor_split(BLOCKS), labels[first:].tensor_split(BLOCKS), strict=True)
    return torch.tensor([auc(some, clicked) for some, clicked in pairs], dtype=torch.float64)


def _train(batches: list[Batch], policy: Policy, rows: int) -> tuple[Tensor, Any]:
    """The logit of every sample, predicted before it is trained on, and the users' table."""
    torch.manual_seed(0)
    ends: dict[str, Any] = {"weight_init_min": -0.01, "weight_init_max": 0.01}
    users = DynamicEmbeddingConfig(USERS, DIM, rows, evict=policy.evict, admit=policy.admit, **ends)
    others = [DynamicEmbeddingConfig(f"cat_{i}", DIM, 2 * LIVE[i], **ends) for i in range(1, len(LIVE))]
    collection = DynamicEmbeddingBagCollection([users, *others], RowWiseAdagrad, {"lr": 0.05})
    model = DLRM(collection, DENSE, [DIM], [64, 1])  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    logits = []
    for step, batch in enumerate(batches):
        collection.set_epoch(step // EPOCH_STEPS)
        found = model(batch.dense_features, batch.sparse_features).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(found, batch.labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        logits.append(found.detach())
    return torch.cat(logits), collection.table(USERS)
