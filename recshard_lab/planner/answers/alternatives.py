"""The best place for one table while all others stay. The cost model scores every candidate.

Shape letters: K loads, W ranks, C candidates, n shards.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.search.candidates import dealt
from recshard_lab.planner.search.options import Option, Placement
from recshard_lab.planner.workload import Array
from recshard_lab.sharding import ParameterSharding

EACH = 128  # ranks on which a single shard is tried: all, or those with the least work and the most free memory
ONE_BY_ONE = 1 << 18  # shards x ranks x ranks up to which shards are placed one by one on the cheapest rank
BATCH = 1 << 16  # candidates x ranks that are scored at once


def best_placement(
    model: CostModel, option: Option, rest: Array, but: ParameterSharding | None = None
) -> tuple[tuple[bool, float, float], Placement] | None:
    """The best placement of an option beside the loads `rest` ``[K, W]``, with its score.

    The score is ``(False, ms, bytes of the fullest rank)``, or ``(True, bytes, ms)`` if the placement does not fit. So
    the best placement is the one that exceeds the memory least if none fits.

    Args:
        but: the present placement. It is left out, and every placement that gives each rank shards of the same sizes.
    """
    tried = list(dict.fromkeys(_candidates(model, option, rest)))
    if but is not None and but.route == option.route:
        sizes = [(rows[1] - rows[0], cols[1] - cols[0]) for rows, cols in option.proposal.rects]
        now = sorted((shard.rank, (shard.num_rows, shard.num_cols)) for shard in but.shards)
        if sorted(sizes) == sorted(size for _, size in now):
            tried = [ranks for ranks in tried if sorted(zip(ranks, sizes, strict=True)) != now]
    best: tuple[tuple[bool, float, float], Placement] | None = None
    size = max(1, BATCH // model.topology.world_size)
    for start in range(0, len(tried), size):
        some = [Placement(option, ranks) for ranks in tried[start : start + size]]
        scores = _scores(model, rest[:, None] + np.stack([each.loads(model.topology) for each in some], axis=1))
        at = min(range(len(some)), key=scores.__getitem__)
        if best is None or scores[at] < best[0]:
            best = scores[at], some[at]
    return best


def _scores(model: CostModel, loads: Array) -> list[tuple[bool, float, float]]:
    """Scores of plans with loads ``[K, C, W]``."""
    ms = model.step_ms(loads)
    held = model.memory_total(loads).max(axis=-1)
    late = held > model.usable_bytes
    return [
        (bool(full), *((has, took) if full else (took, has)))
        for full, took, has in zip(late.tolist(), ms.tolist(), held.tolist(), strict=True)
    ]


def _candidates(model: CostModel, option: Option, rest: Array) -> Iterator[tuple[int, ...]]:
    """Ranks for the option's shards: the listed ones, or those with the least work, with the most free memory, and one
    by one."""
    if option.proposal.assignments is not None:
        yield from option.proposal.assignments
        return
    usable = np.array(sorted(option.usable))
    busy, held = model.phases(rest).sum(axis=0)[usable], model.memory_total(rest)[usable]
    least_work, emptiest = usable[busy.argsort(kind="stable")], usable[held.argsort(kind="stable")]
    n = len(option.of)
    if n == 1:
        yield from ((rank,) for order in (least_work, emptiest) for rank in order[:EACH].tolist())
        return
    nodes = model.topology.num_nodes
    of_node = np.array([model.topology.node_of(rank) for rank in least_work.tolist()])
    work = np.bincount(of_node, weights=np.sort(busy), minlength=nodes)
    for order in (least_work, emptiest, least_work[np.argsort(work[of_node], kind="stable")]):
        yield tuple(dealt(option, order).tolist())
    if n <= len(usable) and n * len(usable) ** 2 <= ONE_BY_ONE:
        yield _one_by_one(model, option, rest, usable)


def _one_by_one(model: CostModel, option: Option, rest: Array, usable: NDArray[np.intp]) -> tuple[int, ...]:
    """Each shard, the heaviest first, on the cheapest rank; one shard per rank."""
    ranks, open_, loads, pieces = [0] * len(option.of), usable.tolist(), rest, option.loads
    for i in option.heavy_first.tolist():
        tries = np.repeat(loads[:, None], len(open_), axis=1)
        tries[:, np.arange(len(open_)), open_] += pieces[:, i : i + 1]
        scores = _scores(model, tries)
        best = min(range(len(open_)), key=scores.__getitem__)
        loads = tries[:, best]
        ranks[i] = open_.pop(best)
    return tuple(ranks)


def could_be(option: Option, now: ParameterSharding) -> bool:
    """Whether a table is placed as this option proposes."""
    sizes = sorted((rows[1] - rows[0], cols[1] - cols[0]) for rows, cols in option.proposal.rects)
    ranks, listed = tuple(shard.rank for shard in now.shards), option.proposal.assignments
    return (
        (option.proposal.scheme, option.route, option.kernel) == (now.sharding_type, now.route, now.compute_kernel)
        and sizes == sorted((shard.num_rows, shard.num_cols) for shard in now.shards)
        and (option.usable.issuperset(ranks) if listed is None else ranks in listed)
    )
