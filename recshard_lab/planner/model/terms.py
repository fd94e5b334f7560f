"""A cost model as linear terms, which solvers and bounds work on.

Almost all of `CostModel.phases` is linear in the loads; what is not is either a cost that is paid once (a switch) or
the receiving side of a wire. With ``x [K]`` the loads of a shard on rank r, a step takes ::

    sum over phases p of  max over ranks r of  own[p] x of r  +  node[p] x of r's node  +  everyone[p] x of all ranks
                                            +  fixed[p]  +  fixed[p] of every switch that is on

The last row is not milliseconds but bytes of memory, which every rank must have.

The receiving side needs no term: of W ranks that send ``x_r`` bytes to each peer, the busiest receiver gets
``sum(x) - min(x) <= (W - 1) max(x)``, what the busiest sender sends. The step from the terms is therefore never more
than `CostModel`'s, and equal unless a rank that receives much has other work in the same phase: a bound on it bounds
the step.

Shape letters: K loads, Q phases and memory, n shards.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.workload import Array

SOME = 1e-3  # of any load; less is rounding


@dataclass(frozen=True, eq=False)
class Switch:
    """A cost that a plan pays once any rank holds any of some loads.

    Attributes:
        loads: rows of K; any of them turns it on.
        fixed: ``[Q]``.
        everyone: ``[Q, K]``, per load of any rank, while it is on.
    """

    loads: tuple[int, ...]
    fixed: Array
    everyone: Array | None = None


@dataclass(frozen=True, eq=False)
class Terms:
    """What loads cost, linearly.

    Attributes:
        own: ``[Q, K]`` per load of a rank, to that rank.
        node: ``[Q, K]`` per load of a rank, to every rank of its node.
        everyone: ``[Q, K]`` per load of any rank, to all.
        fixed: ``[Q]`` costs of every plan.
        switches: costs that are paid once.
    """

    own: Array
    node: Array
    everyone: Array
    fixed: Array
    switches: tuple[Switch, ...] = field(default=())

    def times(self, factor: float) -> "Terms":
        """Milliseconds multiplied; bytes as they are."""
        by = np.append(np.full(len(self.fixed) - 1, factor), 1.0)
        rows = by[:, None]
        switches = tuple(
            Switch(one.loads, one.fixed * by, None if one.everyone is None else one.everyone * rows)
            for one in self.switches
        )
        return Terms(self.own * rows, self.node * rows, self.everyone * rows, self.fixed * by, switches)

    def mean(self, other: "Terms", weight: float) -> "Terms":
        """The weighted mean of these terms and others of the same model; `weight` is that of these."""
        switches: dict[tuple[object, ...], Switch] = {}
        for terms, share in ((self, weight), (other, 1 - weight)):
            for one in terms.switches:
                key, more = (one.loads, one.everyone is None), one.everyone
                known = switches.get(key)
                fixed = share * one.fixed + (0 if known is None else known.fixed)
                if more is not None:
                    more = share * more + (0 if known is None or known.everyone is None else known.everyone)
                switches[key] = Switch(one.loads, fixed, more)
        ours, theirs = (
            (self.own, self.node, self.everyone, self.fixed),
            (other.own, other.node, other.everyone, other.fixed),
        )
        own, node, everyone, fixed = (weight * a + (1 - weight) * b for a, b in zip(ours, theirs, strict=True))
        return Terms(own, node, everyone, fixed, tuple(switches.values()))

    def flags(self, loads: Array) -> NDArray[np.intp]:
        """``[n]`` bit mask of the switches that each of loads ``[K, n]`` turns on."""
        bits = np.zeros(loads.shape[1], dtype=np.intp)
        for i, switch in enumerate(self.switches):
            bits |= (np.abs(loads[list(switch.loads)]).sum(axis=0) > SOME).astype(np.intp) << i
        return bits

    def paid(self, bits: int) -> Array:
        """``[Q]`` what is paid once while these switches are on."""
        on = [switch.fixed for i, switch in enumerate(self.switches) if bits >> i & 1]
        return np.asarray(self.fixed + sum(on, np.zeros_like(self.fixed)))

    def shared(self, bits: int) -> Array:
        """``[Q, K]`` per load of any rank, to all, while these switches are on."""
        on = [s.everyone for i, s in enumerate(self.switches) if bits >> i & 1 and s.everyone is not None]
        return np.asarray(self.everyone + sum(on, np.zeros_like(self.everyone)))

    def spent(self, loads: Array, nodes: int) -> Array:
        """``[Q, W]`` ms in each phase, and bytes, of ranks that hold `loads` ``[K, W]`` on so many nodes."""
        bits = self.switched(loads)
        return np.asarray(self.caused(loads, nodes, bits) + self.paid(bits)[:, None])

    def caused(self, loads: Array, nodes: int, bits: int) -> Array:
        """The same while these switches are on, without what is paid once: linear in `loads`, so tables' add up."""
        by_node = (self.node @ loads).reshape(len(self.own), nodes, -1).sum(axis=-1)
        shared = self.shared(bits) @ loads.sum(axis=1)
        return np.asarray(self.own @ loads + np.repeat(by_node, loads.shape[1] // nodes, axis=1) + shared[:, None])

    def switched(self, loads: Array) -> int:
        """Bit mask of the switches that ranks with `loads` ``[K, W]`` turn on."""
        return int(np.bitwise_or.reduce(self.flags(loads.sum(axis=1)[:, None])))


def modes(flags: Collection[int]) -> list[int]:
    """Every set of switches that a plan can turn on, given those of each choice; fewest first.

    >>> modes([0b01, 0b10])
    [1, 2, 3]
    """
    found: set[int] = set()
    for bits in set(flags):
        found |= {bits} | {bits | other for other in found}
    return sorted(found, key=lambda bits: (bits.bit_count(), bits))
