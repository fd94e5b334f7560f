"""Training: loop, pipelines, metrics, recipes, and runs from a config."""

from ..lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
