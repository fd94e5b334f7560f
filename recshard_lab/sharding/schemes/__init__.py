"""Schemes split a table into shards: geometry only, without costs, kernels or communication.

In walking order: `even_tiling`, `base` (what a scheme is, the registry), one file per scheme from `table_wise` to
`data_parallel`, `nodes` (shared by node-aware schemes), `generators` and `module_plan` (plans written by hand).
The order of registration below is the order of charts and menus.

Bytes that one feature moves between ranks in a step
----------------------------------------------------

Each scheme's file has a closed formula: W ranks, a local batch of B samples with L ids each, D columns, one row shard
or column shard per rank, int32 ids and lengths, fp32 rows, the output path "direct". The total is over all ranks;
bytes that stay on a rank do not count. Derivation for R row shards x C column shards on different ranks, with equally
likely rows:

- **ids**: every id goes to the C shards that have its row. W ranks send B L ids each to C of the R C shards' ranks; a
  rank that stores a shard keeps B L / R of its own ids. So ``4 (W C B L - R C B L / R) = 4 (W - 1) B C L``.
- **lengths**: every rank sends B bag lengths to each shard of another rank: ``4 (W R C - R C) B = 4 (W - 1) B R C``.
- **rows**: every shard sends D / C columns of a sum per bag to every other rank, forward, and receives their
  gradients, backward: ``2 * 4 (W R C - R C) B D / C = 4 (W - 1) B 2 R D``.

Together ``4 (W - 1) B (C L + R C + 2 R D)``: column shards multiply ids, row shards multiply rows, the lengths are
the small term. A step also has W (W - 1) messages of 32 bytes with the sizes, and 16 bytes per shard and source rank.
"""

from recshard_lab.sharding.schemes.base import Proposal as Proposal
from recshard_lab.sharding.schemes.base import Scheme as Scheme
from recshard_lab.sharding.schemes.base import place_default as place_default
from recshard_lab.sharding.schemes.base import register_scheme as register_scheme
from recshard_lab.sharding.schemes.base import scheme_named as scheme_named
from recshard_lab.sharding.schemes.base import scheme_names as scheme_names
from recshard_lab.sharding.schemes.base import unregister_scheme as unregister_scheme
from recshard_lab.sharding.schemes.base import usable_ranks as usable_ranks
from recshard_lab.sharding.schemes.column_wise import ColumnWise
from recshard_lab.sharding.schemes.data_parallel import DataParallel
from recshard_lab.sharding.schemes.flex_shard import FlexShard
from recshard_lab.sharding.schemes.grid_shard import GridShard
from recshard_lab.sharding.schemes.row_wise import RowWise
from recshard_lab.sharding.schemes.table_column_wise import TableColumnWise
from recshard_lab.sharding.schemes.table_row_wise import TableRowWise
from recshard_lab.sharding.schemes.table_wise import TableWise

for _scheme in (
    TableWise(),
    RowWise(),
    ColumnWise(),
    TableRowWise(),
    TableColumnWise(),
    GridShard(),
    FlexShard(),
    DataParallel(),
):
    register_scheme(_scheme)
