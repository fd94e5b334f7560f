"""Embedding tables: what they are, the unsharded truth, the kernels that look rows up and step them.

In walking order::

    configs.py           what a table is: names, sizes, number format, pooling
    collections.py       unsharded collections, the reference for all others
    inputs.py            checks and conversions of a batch before its lookup
    optimizers/          the formulas of optimizers on touched rows
    kernels/             lookups of all shards of a rank, with the optimizer inside backward
    fused.py             optimizers and collections that step during backward
    scaled_loss.py       refuses torch's GradScaler for such tables
    regroup.py           pooled columns joined by groups of features
    dynamic/             tables whose rows are created when an id occurs first
    managed_collision/   tables of fixed size for ids of any value
    quantized/           tables for serving, in fewer bytes
"""

from ..lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
