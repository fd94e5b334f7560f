"""The output exchange: sends looked-up rows to the ranks of their samples, and their gradients back.

A plan chooses an output path for each table (``route=``). Tables with one path share its messages::

    direct           forward   owner: partial rows of every sample --all-to-all--> local batch: added, columns joined
                     backward  local batch: columns of the gradient --all-to-all--> owner
    reduce_scatter   forward   every rank: [W, B, D], zeros where it stores nothing --reduce-scatter--> local batch
                     backward  local batch: [B, D] --all-gather--> every rank
    two_hop          forward   owner --all-to-all in the node--> added --all-to-all across nodes--> local batch
                     backward  the same two hops in reverse order
    distinct_rows    forward   owner: a row of each distinct id --all-to-all--> local batch: pooled
                     backward  local batch: summed gradients of distinct ids --all-to-all--> owner

`direct` sends as many bytes as `reduce_scatter`, and is several times faster on Gloo. `reduce_scatter` lets the network
add, if it can (NVLink SHARP). `two_hop` adds the row shards of a node before it sends them across nodes:
``local_world_size`` times fewer bytes for table_row_wise and grid_shard. `distinct_rows` moves bytes by distinct id,
not by bag and shard: fewer where a shard sees fewer distinct ids than bags.

All give the same result, up to the order of additions. Sequence collections, whose rows are not added, use `direct`.

Pooled rows, rows of a variable batch and rows of sequences share the exchange (`wire.Exchange`): its parcels, sizes,
messages, and the gradients of replicas behind them. They differ in what a parcel is: the rows of all shard features of
a rank, the bags of one, or its ids. What joins the rows that arrive is separate for sequences: pooled rows are added
by column (`ColumnMap`), and rows of ids are placed by id (`Chunks`), whose number changes with every batch.

Files in walking order: ``base`` (the interface), ``pooled`` and its paths ``direct``, ``reduce_scatter``, ``two_hop``,
``distinct_rows``; ``sequence``; what they share: ``wire``, ``columns``, ``kernel_orders``, ``chunks``, ``means``,
``replica_gradients``; ``local`` for one rank.
"""

from recshard_lab.distributed.step.output_dist.base import Columns as Columns
from recshard_lab.distributed.step.output_dist.base import OutputExchange as OutputExchange
from recshard_lab.distributed.step.output_dist.base import PendingOutput as PendingOutput
from recshard_lab.distributed.step.output_dist.pooled import PooledOutput as PooledOutput
from recshard_lab.distributed.step.output_dist.sequence import SequenceOutput as SequenceOutput
