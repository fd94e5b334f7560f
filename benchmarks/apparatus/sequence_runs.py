"""A sequence model trained twice on the same batches: sharded on ranks, and as its plain twin in one process.

The twin is written from the paper (Kang and McAuley 2018, section 3) in plain torch, and stepped by torch's Adagrad
and Adam. The sharded table's Adagrad is fused into backward. Both start from the same weights.

Shape letters: b users, T longest history, N items of all histories, M items, D columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from recshard_lab.data import SequenceDataset
from recshard_lab.embedding import EmbeddingCollection, EmbeddingConfig
from recshard_lab.models import SASRec
from recshard_lab.train import evaluate_next_item, train_epochs

TABLE_LR, DENSE_LR, EPS, DIM, INIT, BATCH = 0.1, 0.002, 1e-10, 32, 0.05, 64
ITEMS = "embedding_collection.embeddings.movie.weight"


@dataclass(frozen=True)
class Course:
    """What is trained, on what.

    Args:
        ratings: number of synthetic ratings; None for MovieLens 100K.
        scheme: of the item table.
        epochs, max_length: of the training and of its histories.
    """

    ratings: int | None = None
    scheme: str = "row_wise"
    epochs: int = 5
    max_length: int = 50

    def data(self) -> SequenceDataset:
        """The histories."""
        from recshard_lab.data import MovieLens, SyntheticRatings

        ratings = MovieLens.load() if self.ratings is None else SyntheticRatings(self.ratings, 60, 120)
        return SequenceDataset(ratings, self.max_length)

    def untrained(self, num_items: int) -> SASRec:
        """The model, the same at every call."""
        table = EmbeddingConfig(
            name="movie",
            num_embeddings=num_items,
            embedding_dim=DIM,
            feature_names=list(SequenceDataset.feature_names),
            weight_init_min=-INIT,
            weight_init_max=INIT,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return SASRec(EmbeddingCollection([table]), self.max_length, num_heads=2)


@dataclass(frozen=True)
class Trained:
    """Mean loss of each step's global batch, and NDCG@10 of the held-out items."""

    losses: list[float]
    ndcg: float


class PlainSASRec(nn.Module):
    """The twin: functions of torch over a copy of the model's weights, under their names."""

    def __init__(self, model: SASRec) -> None:
        super().__init__()
        blocks: Any = model.blocks
        self.heads: list[int] = [block.num_heads for block in blocks]
        self.weights = {name: nn.Parameter(value.detach().clone()) for name, value in model.named_parameters()}
        for number, parameter in enumerate(self.weights.values()):
            self.register_parameter(f"p{number}", parameter)

    def forward(self, dense_features: Tensor | None, batch: Any) -> Tensor:
        """Logits ``[2N]``: of next items, then of negative items."""
        history = batch["history"].to_dense()
        states = torch.cat([own[: len(ids)] for own, ids in zip(self.states(history), history, strict=True)])
        rows = [self.weights[ITEMS][batch[name].values()] for name in ("next", "negative")]
        return torch.cat([torch.einsum("nd,nd->n", states, own) for own in rows])

    def states(self, histories: list[Tensor]) -> Tensor:
        """``[b, T, D]``, with padding behind each history."""
        x = pad_sequence([self.weights[ITEMS][ids] for ids in histories], batch_first=True)
        x = x + self.weights["position"][: x.shape[1]]
        for number, heads in enumerate(self.heads):
            block = f"blocks.{number}"
            q, k, v = self._linear(f"{block}.qkv", self._norm(f"{block}.attention_norm", x)).chunk(3, dim=2)
            each = [
                functional.scaled_dot_product_attention(*one, is_causal=True)
                for one in zip(q.chunk(heads, 2), k.chunk(heads, 2), v.chunk(heads, 2), strict=True)
            ]
            x = x + self._linear(f"{block}.out", torch.cat(each, dim=2))
            inner = self._linear(f"{block}.network.0", self._norm(f"{block}.network_norm", x))
            x = x + self._linear(f"{block}.network.2", inner.relu())
        return self._norm("norm", x)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        own = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], *own)


def plain(course: Course) -> Trained:
    """The twin, in this process."""
    data = course.data()
    twin = PlainSASRec(course.untrained(data.num_items))
    table = torch.optim.Adagrad([twin.weights[ITEMS]], lr=TABLE_LR, eps=EPS)
    others = torch.optim.Adam([weight for name, weight in twin.weights.items() if name != ITEMS], lr=DENSE_LR)
    losses = []
    for epoch in range(course.epochs):
        for batch in data.batches(BATCH, shuffle=True, seed=epoch):
            logits = twin(None, batch.sparse_features)
            loss = functional.binary_cross_entropy_with_logits(logits, batch.labels)
            table.zero_grad()
            others.zero_grad()
            loss.backward()
            table.step()
            others.step()
            losses.append(float(loss.detach()))
    return Trained(losses, plain_ndcg(twin, data))


@torch.no_grad()
def plain_ndcg(twin: PlainSASRec, data: SequenceDataset, k: int = 10) -> float:
    """NDCG@k, user by user: ``1 / log2(place + 1)`` if the held-out item is among the first k unseen items."""
    gains = []
    for batch in data.held_out_batches(len(data)):
        seen = batch.seen.to_dense()
        for user, ids in enumerate(batch.histories["history"].to_dense()):
            every, wanted = twin.states([ids])[0, -1] @ twin.weights[ITEMS].T, int(batch.items[user])
            scores = every.index_fill(0, seen[user], -torch.inf)
            scores[wanted] = every[wanted]
            place = 1 + int((scores > scores[wanted]).sum())
            gains.append(1 / float(torch.tensor(place + 1.0).log2()) if place <= k else 0.0)
    return sum(gains) / len(gains)


def sharded(course: Course) -> Trained:
    """The model on this rank and its peers."""
    import recshard_lab as rs
    from recshard_lab.distributed import EmbeddingCollectionSharder

    data = course.data()
    model = course.untrained(data.num_items)
    plan = rs.plan(model, constraints={"movie": course.scheme})
    sharder = EmbeddingCollectionSharder({"optimizer": "exact_adagrad", "learning_rate": TABLE_LR, "eps": EPS})
    dmp = rs.DistributedModelParallel(model, plan=plan, sharders=[sharder])
    dense = torch.optim.Adam(dmp.dense_parameters(), lr=DENSE_LR)
    losses = train_epochs(dmp, data, dense, epochs=course.epochs, batch_size=BATCH).losses
    return Trained(losses, evaluate_next_item(dmp, data).ndcg)
