"""Serving: bundles that answer without this library, and what loads and serves them."""

from ..lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
