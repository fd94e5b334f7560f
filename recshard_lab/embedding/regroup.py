"""KTRegroupAsDict: joins pooled columns by groups of features, with a plan computed once."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.fx import wrap

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding.configs import DataType
from recshard_lab.embedding.kernels import TORCH_DTYPES
from recshard_lab.sparse import KeyedTensor
from recshard_lab.sparse.checks import check_all, check_keys, check_list
from recshard_lab.sparse.keyed_tensor import Place, join_regrouped, plan_regroup
from recshard_lab.sparse.trees import Traceable


@names_wrong_arguments
class KTRegroupAsDict(nn.Module):
    """`KeyedTensor.regroup_as_dict` as a module that caches the columns of each group.

    Args:
        groups: the keys of each result, in order; a key may be in several groups.
        keys: a name for each group.
        emb_dtype: number format of the results; as the inputs when left out.
        multi_device: accepted for compatibility with TorchRec, without effect.

    Raises:
        ValueError: groups and keys of different numbers.

    >>> import torch
    >>> pooled = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))
    >>> KTRegroupAsDict([["b"], ["b", "a"]], ["user", "all"])([pooled])
    {'user': tensor([[2., 3.]]), 'all': tensor([[2., 3., 1.]])}
    """

    def __init__(
        self,
        groups: list[list[str]],
        keys: list[str],
        emb_dtype: DataType | None = None,
        multi_device: bool = False,
    ) -> None:
        super().__init__()
        if len(check_list("groups", groups)) != len(check_keys(keys)):
            raise ValueError(f"got {len(keys)} keys for {len(groups)} groups: give one key a group")
        if emb_dtype is not None and emb_dtype not in TORCH_DTYPES:
            raise ValueError(f"emb_dtype must be one of {[kind.value for kind in TORCH_DTYPES]}, got {emb_dtype}")
        self._groups, self._keys, self._emb_dtype = groups, keys, emb_dtype
        self._plan = _Plan()

    def forward(self, keyed_tensors: list[KeyedTensor]) -> dict[str, Tensor]:
        """Joins the columns.

        Args:
            keyed_tensors: of equal shape but for the keys' dimension. For another layout than before the plan is
                computed anew.

        Returns:
            One new tensor a group, by name.

        Raises:
            ValueError: a key that is missing or in several tensors, or tensors that do not fit together.
        """
        joined = _regroup(self._plan, keyed_tensors, self._groups)
        return {
            key: joined[place] if self._emb_dtype is None else joined[place].to(TORCH_DTYPES[self._emb_dtype])
            for place, key in enumerate(self._keys)
        }

    def clear_cache(self) -> None:
        """Forgets the plan."""
        self._plan.layout = None


class _Plan(metaclass=Traceable):
    """The columns of each group in the last layout."""

    layout: Any = None
    places: list[list[Place]]


@wrap
def _regroup(plan: _Plan, keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    check_all("keyed_tensors", keyed_tensors, KeyedTensor)
    layout = [(kt.keys(), kt.length_per_key(), kt.key_dim()) for kt in keyed_tensors]
    if layout != plan.layout:
        plan.places = plan_regroup(keyed_tensors, groups)
        plan.layout = layout
    return join_regrouped([kt.values() for kt in keyed_tensors], plan.places, keyed_tensors[0].key_dim())
