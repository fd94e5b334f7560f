"""Two towers for retrieval: queries and candidates become vectors of one space. Matching vectors are close.

    query features     -- their rows side by side -- MLP --> u [B, K]
                                                              score = <u, v>
    candidate features -- their rows side by side -- MLP --> v [B, K]

A candidate's vector does not depend on the query, so it is computed once and searched by an index
(``recshard_lab.serving.retrieval``).
Huang et al. 2013 (DSSM, CIKM); in this form Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus
Item Recommendations" (RecSys). Training is in ``two_tower_train.py``.

Shape letters: B batch, K width of the common space.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from recshard_lab.arguments import device_named, names_wrong_arguments
from recshard_lab.embedding import EmbeddingBagCollection, embedding_names_by_table
from recshard_lab.models.layers import MLP
from recshard_lab.sparse import KeyedJaggedTensor, KeyedTensor


@names_wrong_arguments
class TwoTower(nn.Module):
    """Two MLPs over one embedding collection.

    Args:
        embedding_bag_collection: the tables of both towers. May be on the meta device.
        layer_sizes: widths of both MLPs; the last one is K, and its layer is linear.
        device: of the MLPs.
        query_tables: names of the tables of the query tower. Default: the first table. The candidate tower has all
            other tables.
        normalize: whether vectors have length 1, so that scores are cosines (Yi et al., section 4.2).

    Raises:
        ValueError: no layer, an unknown table, or a tower without a table.

    >>> from recshard_lab.embedding import EmbeddingBagConfig
    >>> tables = [
    ...     EmbeddingBagConfig(name="users", num_embeddings=10, embedding_dim=8, feature_names=["user"]),
    ...     EmbeddingBagConfig(name="movies", num_embeddings=20, embedding_dim=8, feature_names=["movie"]),
    ... ]
    >>> model = TwoTower(EmbeddingBagCollection(tables), [16, 4])
    >>> ids = KeyedJaggedTensor(["user", "movie"], torch.tensor([3, 1, 4, 7]), lengths=torch.tensor([1, 1, 1, 1]))
    >>> query, candidate = model(ids)
    >>> query.shape, candidate.shape
    (torch.Size([2, 4]), torch.Size([2, 4]))
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        layer_sizes: Sequence[int],
        device: torch.device | str | None = None,
        *,
        query_tables: Sequence[str] | None = None,
        normalize: bool = False,
    ) -> None:
        super().__init__()
        device = device_named(device)
        tables = embedding_bag_collection.embedding_bag_configs()
        names = [table.name for table in tables]
        chosen = names[:1] if query_tables is None else list(query_tables)
        if not set(chosen) <= set(names) or not 0 < len(set(chosen)) < len(names):
            raise ValueError(
                f"query_tables must be some of {names}, but not all, got {chosen}. Fix: leave a table for candidates"
            )
        if not len(layer_sizes):
            raise ValueError("layer_sizes is empty. Fix: pass widths such as [64, 32]; the last is that of the vectors")
        self.embedding_bag_collection = embedding_bag_collection
        self.normalize = normalize
        keys = dict(zip(names, embedding_names_by_table(tables), strict=True))
        self.query_keys = [key for name in names if name in chosen for key in keys[name]]
        self.candidate_keys = [key for name in names if name not in chosen for key in keys[name]]
        self.features = [feature for table in tables for feature in table.feature_names]
        width = {key: table.embedding_dim for table in tables for key in keys[table.name]}
        sizes = list(layer_sizes)
        self.query_proj = _tower(sum(width[key] for key in self.query_keys), sizes, device)
        self.candidate_proj = _tower(sum(width[key] for key in self.candidate_keys), sizes, device)

    @names_wrong_arguments
    def forward(self, kjt: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """ids of B samples -> query vectors ``[B, K]``, candidate vectors ``[B, K]``"""
        rows = self.embedding_bag_collection(kjt)
        return self._through(self.query_proj, rows, self.query_keys), self._candidates(rows)

    @names_wrong_arguments
    def query(self, kjt: KeyedJaggedTensor) -> Tensor:
        """ids of B queries -> ``[B, K]``. Features of candidates may be missing."""
        rows = self.embedding_bag_collection(with_all(kjt, self.features))
        return self._through(self.query_proj, rows, self.query_keys)

    @names_wrong_arguments
    def candidate(self, kjt: KeyedJaggedTensor) -> Tensor:
        """ids of B candidates -> ``[B, K]``. Features of queries may be missing."""
        return self._candidates(self.embedding_bag_collection(with_all(kjt, self.features)))

    def _candidates(self, rows: KeyedTensor) -> Tensor:
        return self._through(self.candidate_proj, rows, self.candidate_keys)

    def _through(self, tower: MLP, rows: KeyedTensor, keys: Sequence[str]) -> Tensor:
        vectors: Tensor = tower(torch.cat([rows[key] for key in keys], dim=1))
        return functional.normalize(vectors, dim=1) if self.normalize else vectors


def _tower(width: int, sizes: Sequence[int], device: torch.device | str | None) -> MLP:
    return MLP(width, sizes, device=device, activation_on_last=False)


def with_all(kjt: KeyedJaggedTensor, features: Sequence[str]) -> KeyedJaggedTensor:
    """The batch, with empty bags for missing features."""
    there = kjt.keys()
    missing = [feature for feature in features if feature not in there]
    if not missing:
        return kjt
    none = kjt.lengths().new_zeros(len(missing) * kjt.stride())
    return KeyedJaggedTensor(
        [*kjt.keys(), *missing], kjt.values(), kjt.weights_or_none(), lengths=torch.cat([kjt.lengths(), none])
    )
