"""Sharded collections and models: one executor that runs any tiling.

In walking order::

    model_parallel.py        DistributedModelParallel: shards collections, and replicates the dense part
    sharders.py              which modules are sharded, and their settings
    sharded_collections.py   collections with sharded tables, called like the unsharded ones
    discover.py              facts that must be equal on all ranks
    step/                    one step: ids to the ranks of their rows, lookup, rows back
    awaitable.py             results that are waited for late
    fused_optimizer.py       the optimizers inside backward, as one torch optimizer
    data_parallel.py         the dense part: DistributedDataParallel or FSDP2
    dmp_collection.py        DMPCollection: replicas that are averaged periodically
    peers.py                 samples exchanged between ranks, for losses
    row_tracker.py           which rows were trained or looked up
    state/                   what ranks store between steps, and how it moves
"""

from ..lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
