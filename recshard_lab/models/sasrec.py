"""Next item of a sequence by self-attention (SASRec: Kang and McAuley 2018, ICDM, arXiv 1808.09781).

    history  [N]  -- rows + row of the place -- blocks of causal attention --> states [N, D]
    next     [N]  -- rows ------------------------------------------------>  score = <state, row>
    negative [N]  -- rows ------------------------------------------------>  score = <state, row>

Place t sees the items up to t and scores the item at t + 1 above a random one. All three features read one table.

Shape letters: b users of this rank, N items of their histories, T longest history, D columns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding import EmbeddingCollection
from recshard_lab.models.two_tower import with_all
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor


class AttentionBlock(nn.Module):
    """One block: causal self-attention, then a two-layer network, each behind a layer norm and added to its input.

    Args:
        dim: D.
        num_heads: attention heads; they split D.
        device: device of the parameters.

    Raises:
        ValueError: heads that do not divide D.

    >>> AttentionBlock(8, 2)(torch.zeros(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, dim: int, num_heads: int = 1, device: torch.device | str | None = None) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads is {num_heads}, which does not divide {dim} columns. Fix: use a divisor")
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim, device=device)
        self.qkv = nn.Linear(dim, 3 * dim, device=device)
        self.out = nn.Linear(dim, dim, device=device)
        self.network_norm = nn.LayerNorm(dim, device=device)
        self.network = nn.Sequential(nn.Linear(dim, dim, device=device), nn.ReLU(), nn.Linear(dim, dim, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """``[b, T, D] -> [b, T, D]``; place t depends on places up to t."""
        heads = self.qkv(self.attention_norm(x)).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = heads[0] @ heads[1].transpose(2, 3) * heads.shape[-1] ** -0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        mixed = functional.softmax(scores.masked_fill(later, -torch.inf), dim=-1) @ heads[2]
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.network(self.network_norm(x))


@names_wrong_arguments
class SASRec(nn.Module):
    """Scores the next item of each user's history, at every place of it.

    Args:
        embedding_collection: one table that three features read, in this order: the history, the next items and the
            negative items. May be on the meta device.
        max_length: items of the longest history.
        num_blocks: number of `AttentionBlock`.
        num_heads: attention heads of each block.
        device: device of the dense part.

    Raises:
        ValueError: other tables or features, a length below 1, or heads that do not divide D.

    >>> from recshard_lab.embedding import EmbeddingConfig
    >>> table = EmbeddingConfig(
    ...     name="movie", num_embeddings=20, embedding_dim=8, feature_names=["history", "next", "negative"]
    ... )
    >>> model = SASRec(EmbeddingCollection([table]), max_length=10)
    >>> ids = torch.tensor([3, 1, 4, 1, 4, 5, 9, 2, 6])  # histories [3, 1] and [4], their next items, negatives
    >>> batch = KeyedJaggedTensor(table.feature_names, ids, lengths=torch.tensor([2, 1, 2, 1, 2, 1]))
    >>> model(None, batch).shape, model.user_vectors(batch).shape
    (torch.Size([6, 1]), torch.Size([2, 8]))
    """

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        max_length: int,
        num_blocks: int = 2,
        num_heads: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        tables = embedding_collection.embedding_configs()
        features = [feature for table in tables for feature in table.feature_names]
        if len(tables) != 1 or len(features) != 3:
            raise ValueError(
                f"SASRec reads one table by three features, got {len(tables)} tables and features {features}. "
                f"Fix: one table with feature_names=['history', 'next', 'negative']"
            )
        if max_length < 1:
            raise ValueError(f"max_length is {max_length}, but a history has at least 1 item. Fix: use 1 or more")
        self.embedding_collection = embedding_collection
        self.features = features
        self.position = nn.Parameter(torch.empty(max_length, tables[0].embedding_dim, device=device))
        self.blocks = nn.ModuleList(
            AttentionBlock(tables[0].embedding_dim, num_heads, device) for _ in range(num_blocks)
        )
        self.norm = nn.LayerNorm(tables[0].embedding_dim, device=device)
        if not self.position.is_meta:
            nn.init.normal_(self.position, std=0.02)

    @names_wrong_arguments
    def forward(self, dense_features: Tensor | None, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Logits ``[2N, 1]``: of the N next items, then of the N negative items.

        Args:
            dense_features: not read; models of this library are called with two arguments.
            sparse_features: the three features, with equal lengths.

        Raises:
            ValueError: a history longer than `max_length`, or features of unequal lengths.
        """
        history, *others = self.features
        rows = self.embedding_collection(sparse_features)
        states = _flat(self._states(rows[history]), rows[history])
        for other in others:
            if rows[other].values().shape != states.shape:
                raise ValueError(
                    f"feature {other!r} has {rows[other].values().shape[0]} ids for {states.shape[0]} of {history!r}: "
                    f"each place needs one. Fix: give both the same lengths"
                )
        return torch.cat([(states * rows[other].values()).sum(1) for other in others]).unsqueeze(1)

    @names_wrong_arguments
    def user_vectors(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[b, D]``: the state after each user's last item. Only the history is needed; an empty one gives zeros."""
        own = self.embedding_collection(with_all(sparse_features, self.features))[self.features[0]]
        last = own.lengths().long() - 1
        states = self._states(own)[torch.arange(len(last), device=last.device), last]
        return states * (last >= 0).unsqueeze(1)

    @names_wrong_arguments
    def item_vectors(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[N, D]``: the rows of the feature of next items. A score is a user vector times an item vector."""
        rows: Tensor = self.embedding_collection(with_all(sparse_features, self.features))[self.features[1]].values()
        return rows

    def _states(self, history: JaggedTensor) -> Tensor:
        """``[b, T, D]``; places behind a history's end are padding, which no place before them sees."""
        lengths = history.lengths()
        longest = max(1, int(lengths.max())) if len(lengths) else 1
        if longest > len(self.position):
            raise ValueError(
                f"a history has {longest} items, but max_length is {len(self.position)}. Fix: keep the last items"
            )
        x = history.to_padded_dense(longest) + self.position[:longest]
        for block in self.blocks:
            x = block(x)
        normed: Tensor = self.norm(x)
        return normed


def _flat(states: Tensor, history: JaggedTensor) -> Tensor:
    """``[b, T, D] -> [N, D]``: without the padding."""
    lengths, count = history.lengths(), history.values().shape[0]
    starts = lengths.cumsum(0) - lengths
    bag = torch.repeat_interleave(torch.arange(len(lengths), device=states.device), lengths, output_size=count)
    return states[bag, torch.arange(count, device=states.device) - starts[bag]]
