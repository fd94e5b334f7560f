"""Data-parallel: the whole table on every rank, the only scheme whose rectangles overlap.

::

    rank 0:  +---------+    rank 1:  +---------+    rank 2:  +---------+
             |  E x D  |             |  E x D  |             |  E x D  |
             +---------+             +---------+             +---------+

Bytes between ranks per step: ``4 * W * (W - 1) * min(B * (L + 1 + D), U * (1 + D))``, where U is the number of
distinct rows in a rank's batch, ``E * (1 - (1 - 1 / E) ** (B * L))`` for equally likely rows. Every rank sends to
every other rank what the update needs: its bags and their gradients, or its distinct rows and their summed gradients,
whichever is smaller.
"""

from collections.abc import Iterator, Sequence

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.hardware.topology import Topology
from recshard_lab.sharding.plan.constraints import ParameterConstraints
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding
from recshard_lab.sharding.plan.tiling import Rect
from recshard_lab.sharding.plan.types import PlanError
from recshard_lab.sharding.schemes.base import Proposal, usable_ranks
from recshard_lab.sharding.schemes.row_wise import first_ranks


class DataParallel:
    """No exchange of looked-up rows in forward; every replica applies every update."""

    name = "data_parallel"
    label = "DP"
    replicated = True

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterator[Proposal]:
        """One replica on each rank, if all ranks are usable."""
        all_ranks = usable_ranks(topology, None)
        usable = usable_ranks(topology, constraints)
        if usable is all_ranks or sorted(usable) == list(all_ranks):
            whole: Rect = ((0, table.num_embeddings), (0, table.embedding_dim))
            yield Proposal(self.name, (whole,) * topology.world_size, first_ranks(all_ranks, topology.world_size))

    def default(
        self, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
    ) -> ParameterSharding:
        """One replica on each rank.

        Raises:
            PlanError: `ranks` are not all ranks.
        """
        constraints = None if ranks is None else ParameterConstraints(ranks=list(ranks))
        for proposal in self.propose(table, topology, constraints):
            return proposal.placed(range(topology.world_size))
        raise PlanError(
            f"table {table.name!r}: data_parallel keeps a replica on every rank, but ranks={list(ranks or ())!r} "
            f"with world_size {topology.world_size}. Fix: omit ranks"
        )
