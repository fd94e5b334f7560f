"""Table-wise: the whole table is one rectangle on one rank.

::

    rank 1:  +-----------+
             |           |
             |   E x D   |
             |           |
             +-----------+

Bytes between ranks per step: ``4 * (W - 1) * B * (L + 1 + 2 * D)``, derived in `schemes/__init__.py`. W - 1 ranks
send ids and lengths to the table's rank. It sends each of them a row per sample, and receives their gradients.
"""

import zlib
from collections.abc import Iterator, Sequence

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.hardware.topology import Topology
from recshard_lab.sharding.plan.constraints import ParameterConstraints
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding
from recshard_lab.sharding.schemes.base import Proposal, check_ranks, usable_ranks
from recshard_lab.sharding.schemes.even_tiling import EvenTiling


class TableWise:
    """Does not split the table. Cheapest to run, unbalanced, and limited by the memory of one rank."""

    name = "table_wise"
    label = "TW"
    replicated = False

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterator[Proposal]:
        """The whole table on any usable rank."""
        usable_ranks(topology, constraints)
        yield Proposal(self.name, EvenTiling(table.num_embeddings, table.num_embeddings, [table.embedding_dim]))

    def default(
        self, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
    ) -> ParameterSharding:
        """On the first of `ranks`. Default: a rank chosen by a hash of the table's name, so that tables spread."""
        usable = check_ranks(range(topology.world_size) if ranks is None else ranks, topology.world_size)
        chosen = zlib.crc32(table.name.encode()) % topology.world_size if ranks is None else 0
        (proposal,) = self.propose(table, topology)
        return proposal.placed([usable[chosen]])
