"""KeyedTensor: one dense tensor whose columns belong to named features, such as pooled embeddings.

                 "movie"   "genre"
    sample 0     . . . .   . .          values [B, D_movie + D_genre]
    sample 1     . . . .   . .

Shape letters: B samples, K keys, D columns of a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor
from torch.fx import wrap

from recshard_lab.sparse import checks, text
from recshard_lab.sparse.jagged_tensor import Keyed, Tensors
from recshard_lab.sparse.trees import register


class KeyedTensor(Keyed, Tensors):
    """Named slices of one tensor.

    Args:
        keys: K names.
        length_per_key: columns of each key; they sum to the size of `values` along `key_dim`.
        values: usually `[B, sum of D]`.
        key_dim: the dimension that the keys share out.
        offset_per_key, index_per_key: accepted as TorchRec does, and rebuilt here.

    Raises:
        ValueError: counts that do not fit `values`.

    >>> kt = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))
    >>> kt["b"]
    tensor([[2., 3.]])
    """

    def __init__(
        self,
        keys: list[str],
        length_per_key: list[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ) -> None:
        keys = checks.check_keys(keys)
        checks.check_values(values, None)
        if not isinstance(key_dim, int) or not -values.dim() <= key_dim < values.dim():
            raise ValueError(f"key_dim is {key_dim!r}, but values has {values.dim()} dimensions")
        length_per_key = list(checks.check_list("length_per_key", length_per_key))
        if len(length_per_key) != len(keys):
            raise ValueError(f"length_per_key has {len(length_per_key)} entries for {len(keys)} keys")
        for key, length in zip(keys, length_per_key, strict=True):
            checks.check_count(f"length_per_key of {key!r}", length)
        if sum(length_per_key) != values.shape[key_dim]:
            raise ValueError(
                f"length_per_key {length_per_key} sums to {sum(length_per_key)}, but values is "
                f"{list(values.shape)}: expected {values.shape[key_dim]} along dimension {key_dim}"
            )
        checks.check_same("offset_per_key", offset_per_key, [0, *accumulate(length_per_key)])
        if index_per_key is not None:
            checks.check_same("index_per_key", index_per_key, checks.index_keys(keys))
        self._fill(keys, length_per_key, values, key_dim)

    def _fill(self, keys: list[str], length_per_key: list[int], values: Tensor, key_dim: int) -> None:
        self._keys = keys
        self._length_per_key = length_per_key
        self._values = values
        self._key_dim = key_dim

    @classmethod
    def _unchecked(cls, keys: list[str], length_per_key: list[int], values: Tensor, key_dim: int = 1) -> KeyedTensor:
        """The same without a look at anything, for parts that are right by construction (a lookup's output)."""
        self = cls.__new__(cls)
        self._fill(keys, length_per_key, values, key_dim)
        return self

    @staticmethod
    def from_tensor_list(keys: list[str], tensors: list[Tensor], key_dim: int = 1, cat_dim: int = 1) -> KeyedTensor:
        """One key for each tensor, joined.

        Args:
            tensors: K tensors, alike in every dimension but `cat_dim`.

        >>> KeyedTensor.from_tensor_list(["a", "b"], [torch.ones(2, 1), torch.ones(2, 3)]).length_per_key()
        [1, 3]
        """
        checks.check_keys(keys)
        checks.check_all("tensors", tensors, Tensor)
        if len(keys) != len(tensors):
            raise ValueError(f"got {len(keys)} keys for {len(tensors)} tensors: give one key a tensor")
        if not tensors:
            raise ValueError("tensors is an empty list: give at least one")
        for name, dim in (("key_dim", key_dim), ("cat_dim", cat_dim)):
            least = min(tensor.dim() for tensor in tensors)
            if not isinstance(dim, int) or not -least <= dim < least:
                raise ValueError(f"{name} is {dim!r}, but a tensor has {least} dimensions")
        for tensor in tensors:
            checks.check_device("one of tensors", tensor, tensors[0])
        _alike(f"tensors of {keys}", [list(tensor.shape) for tensor in tensors], cat_dim)
        lengths = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, lengths, torch.cat(tensors, dim=cat_dim), key_dim)

    def key_dim(self) -> int:
        """The dimension that the keys share out."""
        return self._key_dim

    def length_per_key(self) -> list[int]:
        """Columns of each key `[K]`."""
        return self._length_per_key

    def __getitem__(self, key: str) -> Tensor:
        """One key's columns, a view. An unknown key raises an error that is KeyError and ValueError."""
        place = self._place(key)
        return self._values.narrow(self._key_dim, self.offset_per_key()[place], self._length_per_key[place])

    def to_dict(self) -> dict[str, Tensor]:
        """Every key's columns by name, as views."""
        parts = self._values.split(self._length_per_key, dim=self._key_dim)
        return {key: parts[place] for key, place in self.index_per_key().items()}

    @staticmethod
    def regroup(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
        """Columns of several KeyedTensors joined by groups of keys.

        Args:
            keyed_tensors: alike in every dimension but the keys'.
            groups: the keys of each result, in order; a key may be in several groups.

        Returns:
            One new tensor a group.

        >>> kt = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))
        >>> KeyedTensor.regroup([kt], [["b", "a"], ["b"]])
        [tensor([[2., 3., 1.]]), tensor([[2., 3.]])]
        """
        return _regroup(keyed_tensors, groups)

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: list[KeyedTensor], groups: list[list[str]], keys: list[str]
    ) -> dict[str, Tensor]:
        """`regroup` with a name for each group.

        >>> kt = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))
        >>> KeyedTensor.regroup_as_dict([kt], [["b"]], ["user"])
        {'user': tensor([[2., 3.]])}
        """
        if len(checks.check_list("groups", groups)) != len(checks.check_keys(keys)):
            raise ValueError(f"got {len(keys)} keys for {len(groups)} groups: give one key a group")
        regrouped = KeyedTensor.regroup(keyed_tensors, groups)
        return {key: regrouped[place] for place, key in enumerate(keys)}

    def _apply(self, move: Callable[[Tensor], Tensor]) -> Self:
        # not of a lazy class: the values are there
        return KeyedTensor._unchecked(self._keys, self._length_per_key, move(self._values), self._key_dim)  # type: ignore

    def __repr__(self) -> str:
        return text.keyed_text(self)


def regroup_kts(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    """`KeyedTensor.regroup`, under the name of TorchRec's function.

    >>> kt = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))
    >>> regroup_kts([kt], [["b", "a"]])[0].tolist()
    [[2.0, 3.0, 1.0]]
    """
    return KeyedTensor.regroup(keyed_tensors, groups)


@wrap
def _regroup(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    """Plans and joins; one node in an fx graph."""
    places = plan_regroup(keyed_tensors, groups)
    return join_regrouped([kt._values for kt in keyed_tensors], places, keyed_tensors[0]._key_dim)


Place = tuple[int, int, int]


def plan_regroup(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[list[Place]]:
    """For each group the (tensor, first column, columns) to join; neighbours in one tensor are taken at once.

    Raises:
        ValueError: a key that is nowhere or in more than one place, tensors that do not fit together.
    """
    home = _homes(checks.check_all("keyed_tensors", keyed_tensors, KeyedTensor))
    plan = []
    for number, group in enumerate(checks.check_list("groups", groups)):
        runs: list[Place] = []
        for key in checks.check_list(f"groups[{number}]", group):
            if key not in home:
                raise checks.unknown_key(key, list(home))
            found = home[key]
            if found is None:
                raise ValueError(f"key {key!r} is in more than one place, so a group cannot ask for it: rename one")
            if runs and runs[-1][0] == found[0] and runs[-1][1] + runs[-1][2] == found[1]:
                runs[-1] = (found[0], runs[-1][1], runs[-1][2] + found[2])
            else:
                runs.append(found)
        plan.append(runs or [(0, 0, 0)])
    return plan


def join_regrouped(values: Sequence[Tensor], plan: list[list[Place]], dim: int) -> list[Tensor]:
    """One new tensor a group."""
    return [torch.cat([values[n].narrow(dim, start, size) for n, start, size in runs], dim=dim) for runs in plan]


def _homes(keyed_tensors: Sequence[KeyedTensor]) -> dict[str, Place | None]:
    """Where each key's columns are: tensor, first column, number; None for a key found twice."""
    if not keyed_tensors:
        raise ValueError("keyed_tensors is an empty list: give at least one KeyedTensor")
    dims = [kt._key_dim for kt in keyed_tensors]
    if len(set(dims)) > 1:
        raise ValueError(f"keyed_tensors must have the same key_dim, got {dims}")
    _alike("keyed_tensors", [list(kt._values.shape) for kt in keyed_tensors], dims[0])
    home: dict[str, Place | None] = {}
    for number, kt in enumerate(keyed_tensors):
        for key, start, length in zip(kt._keys, kt.offset_per_key(), kt._length_per_key, strict=False):
            home[key] = None if key in home else (number, start, length)
    return home


def _alike(name: str, shapes: list[list[int]], dim: int) -> None:
    """Shapes differ in one dimension only."""
    rest = [shape[: dim % len(shape)] + shape[dim % len(shape) + 1 :] for shape in shapes]
    if any(one != rest[0] for one in rest[1:]):  # compared without a hash, for sizes of an export
        raise ValueError(f"{name} must be alike in every dimension but {dim}, got shapes {shapes}")


def _flatten(kt: KeyedTensor) -> tuple[list[Tensor], tuple[Any, ...]]:
    return [kt._values], (tuple(kt._keys), tuple(kt._length_per_key), kt._key_dim)


def register_like_keyed_tensor(cls: type[KeyedTensor]) -> None:
    """Registers a subclass without additional state as a tree node."""

    def unflatten(leaves: Sequence[Any], context: tuple[Any, ...]) -> KeyedTensor:
        keys, lengths, key_dim = context
        return cls._unchecked(list(keys), list(lengths), next(iter(leaves)), key_dim)

    register(cls, _flatten, unflatten, lambda context: ("_values",))


register_like_keyed_tensor(KeyedTensor)
