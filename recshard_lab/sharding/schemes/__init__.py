"""Schemes split a table into shards: geometry only, without costs, kernels or communication.

In walking order: `even_tiling`, `base` (what a scheme is, the registry), one file per scheme from `table_wise` to
`data_parallel`, `nodes` (shared by node-aware schemes), `generators` and `module_plan` (plans written by hand).
The order of registration below is the order of charts and menus.
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
