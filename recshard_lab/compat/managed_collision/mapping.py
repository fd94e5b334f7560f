"""``TrainInputMapper`` and functions of ``torchrec.modules.mc_modules`` and ``mc_embedding_modules``.

Shape letters: N ids, W ranks in training, F features, B batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor


class TrainInputMapper(nn.Module):
    """Which rank stored an id in training, for a table whose row shards were joined for inference.

    Args:
        input_hash_size: ids are below it, and ranks have ranges of ids. 0: ranks have ids modulo the ranks.
        total_num_buckets: W.
        size_per_rank: ``[W]``, rows of each rank.
        train_rank_offsets: ``[W]``, the first row of each rank.
        inference_dispatch_div_train_world_size: whether ids become numbers inside their rank.
        name: of the table.
    """

    _zch_size_per_training_rank: Tensor
    _train_rank_offsets: Tensor

    def __init__(
        self,
        input_hash_size: int,
        total_num_buckets: int,
        size_per_rank: Tensor,
        train_rank_offsets: Tensor,
        inference_dispatch_div_train_world_size: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._input_hash_size, self._buckets = input_hash_size, total_num_buckets
        self._inside, self._name = inference_dispatch_div_train_world_size, name
        self.register_buffer("_zch_size_per_training_rank", size_per_rank)
        self.register_buffer("_train_rank_offsets", train_rank_offsets)

    def forward(self, values: Tensor, output_offset: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Finds the rank of each id.

        Args:
            values: ids ``[N]``.
            output_offset: ``[1]``, is subtracted from the first rows.

        Returns:
            ``[N]`` each: ids, rows of the rank, and its first row.

        Raises:
            IndexError: an id of no rank.
        """
        if self._input_hash_size:
            width = -(-self._input_hash_size // self._buckets)
            ranks, inside = values // width, values % width
        else:
            ranks, inside = values % self._buckets, values // self._buckets
        if len(ranks) and not 0 <= int(ranks.min()) <= int(ranks.max()) < len(self._train_rank_offsets):
            raise IndexError(
                f"table {self._name!r}: an id is of bucket {int(ranks.max())}, and there are "
                f"{len(self._train_rank_offsets)} ranks. Fix: pass size_per_rank and train_rank_offsets of each bucket"
            )
        offsets = self._train_rank_offsets[ranks]
        if output_offset is not None:
            offsets = offsets - output_offset
        return inside if self._inside else values, self._zch_size_per_training_rank[ranks], offsets


def apply_mc_method_to_jt_dict(
    mc_module: nn.Module, method: str, features_dict: dict[str, JaggedTensor]
) -> dict[str, JaggedTensor]:
    """Calls a method of a managed collision module with features, and returns the features in the same order.

    Args:
        mc_module: the module.
        method: "preprocess", "profile" or "remap".
        features_dict: feature -> ids.
    """
    found: dict[str, Any] = getattr(mc_module, method)(features_dict)
    return {name: found[name] for name in features_dict}


def return_remapped_lengths_as_mask(features: KeyedJaggedTensor) -> Tensor:
    """Which bags have an id, bool ``[F * B]``.

    >>> import torch
    >>> kjt = KeyedJaggedTensor(["f"], torch.tensor([7]), lengths=torch.tensor([1, 0]))
    >>> return_remapped_lengths_as_mask(kjt)
    tensor([ True, False])
    """
    return features.lengths() > 0
