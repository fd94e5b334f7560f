"""Recommendation models as published. Their code does not depend on sharding."""

from ..lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
