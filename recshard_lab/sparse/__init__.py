"""Jagged batches: which ids each sample has of each feature, and what is looked up for them."""

from ..lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
