"""Towers: tables beside the dense part that alone reads them, so that both may lie together; names as in TorchRec.

    features -- embeddings -- interaction --\\
    features -- embeddings -- interaction ----- side by side

Sharding finds the collections inside, at ``towers.N.embedding``: a plan that keeps a tower's tables on one rank keeps
their rows from travelling among ranks that do not need them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.sparse import KeyedJaggedTensor


@names_wrong_arguments
class EmbeddingTower(nn.Module):
    """Embeddings and the module that reads them.

    Args:
        embedding_module: ids in, embeddings out.
        interaction_module: embeddings in, one tensor ``[B, ...]`` out.
        device: where both are moved; left where they are when left out.

    >>> tower = EmbeddingTower(nn.Embedding(5, 4), nn.Linear(4, 2))
    >>> tower(torch.tensor([1, 3])).shape
    torch.Size([2, 2])
    """

    def __init__(
        self, embedding_module: nn.Module, interaction_module: nn.Module, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.embedding = embedding_module if device is None else embedding_module.to(device)
        self.interaction = interaction_module if device is None else interaction_module.to(device)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What `embedding_module` takes -> what `interaction_module` gives."""
        found: Tensor = self.interaction(self.embedding(*args, **kwargs))
        return found


@names_wrong_arguments
class EmbeddingTowerCollection(nn.Module):
    """Several towers, each on what it reads: a tower is given the batch of ids, or that of weighted ids, or both.

    Args:
        towers: the towers; see `tower_input_params` for what each is given.
        device: where they are moved.

    Raises:
        ValueError: no tower.
    """

    def __init__(self, towers: Sequence[EmbeddingTower], device: torch.device | str | None = None) -> None:
        super().__init__()
        if not len(towers):
            raise ValueError("towers is empty: give at least one EmbeddingTower")
        self.towers = nn.ModuleList(tower if device is None else tower.to(device) for tower in towers)
        self._input_params = [tower_input_params(tower.embedding) for tower in towers]

    @names_wrong_arguments
    def forward(
        self, features: KeyedJaggedTensor | None = None, weighted_features: KeyedJaggedTensor | None = None
    ) -> Tensor:
        """Batches of ids -> the towers' outputs side by side ``[B, ...]``.

        Raises:
            ValueError: a tower reads a batch that is not there.
        """
        outputs = []
        for number, (tower, (plain, weighted)) in enumerate(zip(self.towers, self._input_params, strict=True)):
            if (plain and features is None) or (weighted and weighted_features is None):
                name = "features" if plain and features is None else "weighted_features"
                raise ValueError(f"tower {number} reads {name}, which were not given")
            given = [batch for batch, read in ((features, plain), (weighted_features, weighted)) if read]
            outputs.append(tower(*given))
        return torch.cat(outputs, dim=1)


def tower_input_params(module: nn.Module) -> tuple[bool, bool]:
    """Whether an embedding module reads ids without weights, and ids with weights.

    A collection says so by ``is_weighted``; any other module by a parameter of its forward named
    ``weighted_features``, beside others.

    >>> from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
    >>> table = EmbeddingBagConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=["f"])
    >>> tower_input_params(EmbeddingBagCollection([table], is_weighted=True))
    (False, True)
    """
    weighted = getattr(module, "is_weighted", None)
    if callable(weighted):
        return (False, True) if weighted() else (True, False)
    names = list(inspect.signature(module.forward).parameters)
    return any(name != "weighted_features" for name in names), "weighted_features" in names
