"""A message of rows: how many rows of which widths go to each rank, and what they look like on the way."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from recshard_lab.comm import Pending, ShardingEnv, issue_all_to_all


@dataclass(frozen=True, slots=True)
class Parcel:
    """``rows`` rows for one rank, each made of embedding rows of these ``widths``, side by side."""

    rows: int
    widths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements, flat."""
        return self.rows * sum(self.widths)


@dataclass(slots=True)
class Arriving:
    """Rows under way."""

    pending: Pending
    buffer_bytes: int

    def wait(self) -> Tensor:
        """The received rows, flat, sender after sender."""
        return self.pending.wait()


class Wire:
    """Sends rows of one direction among some ranks."""

    def __init__(self, env: ShardingEnv, label: str) -> None:
        self.env, self.label = env, label

    def send(self, flat: Tensor, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Arriving:
        """Parcel k of ``flat`` goes to rank k."""
        out, back = [p.size for p in sends], [p.size for p in receives]
        pending = issue_all_to_all(flat, out, back, self.env, self.label)
        return Arriving(pending, (sum(out) + sum(back)) * flat.element_size())
