"""Sharded collections and models: one executor that runs any tiling."""

from ..lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
