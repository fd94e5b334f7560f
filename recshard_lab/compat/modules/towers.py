"""``torchrec.modules.embedding_tower``: two names for ``isinstance`` in scripts. No module is an instance of them."""

from __future__ import annotations

from typing import Any, Never

from torch import nn


class EmbeddingTower(nn.Module):
    """TorchRec's class for tables beside the only dense part that reads them.

    Raises:
        NotImplementedError: always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> Never:
        raise NotImplementedError(
            f"{type(self).__name__} is not supported: a table's rows are sent to the rank of their sample. Fix: a "
            f"module with an EmbeddingBagCollection and the layers that read it"
        )


class EmbeddingTowerCollection(EmbeddingTower):
    """TorchRec's class for several towers.

    Raises:
        NotImplementedError: always.
    """
