"""Embedding tables: what they are, the unsharded truth, the kernels that look rows up and step them.

Read first: `configs`, then `collections`, then `kernels`.
"""

from ..lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
