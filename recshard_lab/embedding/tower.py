"""Towers: tables with the only dense part that reads them, so that both can be on the same rank. Names are TorchRec's.

    features -- embeddings -- interaction --\\
    features -- embeddings -- interaction ----- side by side

Sharding finds the collections at ``towers.N.embedding`` and replicates the interactions. The sharders of towers place
the tables of a tower and its interaction on one node, so that rows do not leave it.
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
        embedding_module: takes ids, returns embeddings.
        interaction_module: takes embeddings, returns one tensor ``[B, ...]``.
        device: where both are moved. Default: they are not moved.

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
        """Arguments of `embedding_module` -> result of `interaction_module`."""
        found: Tensor = self.interaction(self.embedding(*args, **kwargs))
        return found


@names_wrong_arguments
class EmbeddingTowerCollection(nn.Module):
    """Several towers. Each receives the batch of ids, the batch of weighted ids, or both.

    Args:
        towers: the towers. `tower_input_params` decides the inputs of each.
        device: where they are moved.

    Raises:
        ValueError: no tower.
    """

    def __init__(self, towers: Sequence[EmbeddingTower], device: torch.device | str | None = None) -> None:
        super().__init__()
        if not len(towers):
            raise ValueError("towers is empty. Fix: pass at least one EmbeddingTower")
        self.towers = nn.ModuleList(tower if device is None else tower.to(device) for tower in towers)
        self._input_params = [tower_input_params(tower.embedding) for tower in towers]

    @names_wrong_arguments
    def forward(
        self, features: KeyedJaggedTensor | None = None, weighted_features: KeyedJaggedTensor | None = None
    ) -> Tensor:
        """Batches of ids -> the towers' outputs side by side ``[B, ...]``.

        Raises:
            ValueError: a tower needs a batch that was not passed.
        """
        outputs = []
        for number, (tower, (plain, weighted)) in enumerate(zip(self.towers, self._input_params, strict=True)):
            if (plain and features is None) or (weighted and weighted_features is None):
                name = "features" if plain and features is None else "weighted_features"
                raise ValueError(f"tower {number} needs {name}, which is None. Fix: pass {name}=")
            inputs = [batch for batch, read in ((features, plain), (weighted_features, weighted)) if read]
            outputs.append(tower(*inputs))
        return torch.cat(outputs, dim=1)


def tower_input_params(module: nn.Module) -> tuple[bool, bool]:
    """Whether an embedding module reads ids without weights, and ids with weights.

    A collection has ``is_weighted``. Any other module reads both if its forward takes two positional arguments, and
    weighted ids alone if its only argument is named ``weighted_features``.

    >>> from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
    >>> table = EmbeddingBagConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=["f"])
    >>> tower_input_params(EmbeddingBagCollection([table], is_weighted=True))
    (False, True)
    """
    weighted = getattr(module, "is_weighted", None)
    if callable(weighted):
        return (False, True) if weighted() else (True, False)
    parameters = inspect.signature(module.forward).parameters.values()
    if any(one.kind is one.VAR_POSITIONAL for one in parameters) or len(parameters) > 1:
        return True, True
    weighted = [one.name for one in parameters] == ["weighted_features"]
    return not weighted, weighted
