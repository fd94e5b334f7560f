"""How looked-up rows come home, and how their gradients go back.

A plan names a route for each table; tables of one route share its messages, whatever their schemes::

    direct           forward   owner: partial rows of every sample --all-to-all--> local_batch: added, columns joined
                     backward  local_batch: columns of the gradient       --all-to-all--> owner
    reduce_scatter   forward   every rank: [W, B, D], zeros where it has nothing --reduce-scatter--> local_batch: [B, D]
                     backward  local_batch: [B, D]                        --all-gather--> every rank
    two_hop          forward   owner --all-to-all inside the node--> added there --all-to-all across nodes--> home
                     backward  the same two hops the other way round

What each is for: `direct` moves the bytes that a reduce-scatter would, and on Gloo it is several times faster.
`reduce_scatter` lets a network that can (NVLink SHARP) add on the way. `two_hop` sends a node's row stripes across
nodes once, already added: ``local_world_size`` times fewer bytes for table_row_wise and grid_shard; rank r of a node
talks to rank r of the others.

All give the same result, up to the order of additions. Rows that are not added, which are those of sequence
collections, know `direct` alone.
"""

from recshard_lab.distributed.step.output_dist.base import Columns as Columns
from recshard_lab.distributed.step.output_dist.base import OutputExchange as OutputExchange
from recshard_lab.distributed.step.output_dist.base import PendingOutput as PendingOutput
from recshard_lab.distributed.step.output_dist.pooled import PooledOutput as PooledOutput
from recshard_lab.distributed.step.output_dist.sequence import SequenceOutput as SequenceOutput
from recshard_lab.distributed.step.output_dist.variable_batch import VariableOutput as VariableOutput
