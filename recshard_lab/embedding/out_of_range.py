"""What becomes of ids that are no rows of their table: refused, moved to the nearest row, or left out. Counted.

Shape letters: N ids of a feature, M of them left, B bags, D columns, E rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from recshard_lab.sparse import JaggedTensor
from recshard_lab.sparse.tracing import Traceable

POLICIES = ("error", "clamp", "ignore")


class OutOfRange(metaclass=Traceable):
    """A policy for ids below 0 or beyond the table, and how many it met.

    Args:
        policy: ``"error"`` refuses the batch. ``"clamp"`` moves an id to the nearest row, 0 or E - 1.
            ``"ignore"`` leaves it out: it adds nothing to its bag (in a sequence it is a row of zeros), touches no
            row in backward and no optimizer state. A MEAN still divides by the bag's length as it was given.

    Attributes:
        counts: ids met so far, by the key of the output they belonged to; not under ``"error"``.

    Raises:
        ValueError: another name.

    >>> policy = OutOfRange("ignore")
    >>> bag, kept = policy.fit(JaggedTensor(torch.tensor([7, 1, -1]), lengths=torch.tensor([2, 1])), "f", "t", 4)
    >>> bag.values().tolist(), bag.lengths().tolist(), kept.tolist(), policy.count()
    ([1], [1, 0], [1], 2)
    """

    def __init__(self, policy: str = "error") -> None:
        if policy not in POLICIES:
            raise ValueError(f"out_of_range must be one of {', '.join(map(repr, POLICIES))}, got {policy!r}")
        self.policy = policy
        self.counts: dict[str, Tensor] = {}

    def fit(self, bag: JaggedTensor, feature: str, table: str, rows: int) -> tuple[JaggedTensor, Tensor | None]:
        """The bags to look up in a table, all of whose ids are rows.

        Args:
            bag: ids ``[N]`` in ``[B]`` bags, of one feature.
            rows: E.

        Returns:
            The bags, and the positions ``[M]`` in ``[0, N)`` of the ids in them where some were left out, else None.

        Raises:
            ValueError: ids that are not integers; under ``"error"`` one that is no row, with its feature and sample.
        """
        ids, lengths = bag.values(), bag.lengths()
        if ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"feature {feature!r}: ids must be int32 or int64, got {ids.dtype}: use values.long()")
        if ids.dim() != 1:
            raise ValueError(f"feature {feature!r}: ids must be [N], got shape {list(ids.shape)}")
        compiling = torch.compiler.is_compiling()
        if not compiling and (ids.is_meta or ids.numel() == 0 or _within(ids, rows)):
            return bag, None
        outside = (ids < 0) | (ids >= rows)
        if self.policy == "error":
            if not compiling:
                raise _error(ids, lengths, outside, feature, table, rows)
            torch._assert_async(~outside.any(), f"feature {feature!r}: an id is no row of table {table!r}")
            return bag, None
        key = f"{feature}@{table}"
        self.counts[key] = self.counts.get(key, 0) + outside.sum()
        if self.policy == "clamp":
            return JaggedTensor._unchecked(ids.clamp(0, rows - 1), bag.weights_or_none(), lengths), None
        keep = ~outside
        kept = keep.nonzero().flatten()
        ends = functional.pad(keep.cumsum(0), (1, 0))
        weights = bag.weights_or_none()
        left = ends[functional.pad(lengths.cumsum(0), (1, 0))].diff().to(lengths.dtype)
        return JaggedTensor._unchecked(ids[kept], None if weights is None else weights[kept], left), kept

    def count(self) -> int:
        """Ids met so far that were no rows."""
        return sum(int(count) for count in self.counts.values())


def put_back(rows: Tensor, kept: Tensor | None, total: int) -> Tensor:
    """Rows ``[M, D]`` of the ids that were left -> ``[N, D]``, zeros for the others."""
    return rows if kept is None else rows.new_zeros(total, rows.shape[1]).index_copy(0, kept, rows)


def policy_of_bounds_check_mode(mode: Any) -> str:
    """The policy that means what fbgemm's `BoundsCheckMode` (member or name) means.

    Raises:
        ValueError: a mode without a twin here: WARNING and IGNORE look an id out of range up in row 0, and train
            that row; NONE reads whatever memory lies there.

    >>> policy_of_bounds_check_mode("FATAL")
    'error'
    """
    name = str(getattr(mode, "name", mode)).upper().removeprefix("V2_")
    if name == "FATAL":
        return "error"
    if name in ("WARNING", "IGNORE"):
        raise ValueError(
            f"bounds_check_mode={name} would look ids out of range up in row 0 and train it: choose "
            f"out_of_range='clamp' (the nearest row) or out_of_range='ignore' (no row) instead; both count them"
        )
    if name == "NONE":
        raise ValueError("bounds_check_mode=NONE would read beyond the table: choose FATAL, or give out_of_range=")
    raise ValueError(f"bounds_check_mode must be FATAL, a member of fbgemm's BoundsCheckMode, got {mode!r}")


def _within(ids: Tensor, rows: int) -> bool:
    low, high = torch.stack(ids.aminmax()).tolist()
    return bool(low >= 0 and high < rows)


def _error(ids: Tensor, lengths: Tensor, outside: Tensor, feature: str, table: str, rows: int) -> ValueError:
    place = int(outside.nonzero()[0])
    sample = int(torch.searchsorted(lengths.cumsum(0), place, right=True))
    return ValueError(
        f"feature {feature!r}, sample {sample}: id {int(ids[place])} is not a row of table {table!r}, which has "
        f"ids 0 to {rows - 1}: fix the id, raise num_embeddings, or choose out_of_range='clamp' or 'ignore'"
    )
