"""Training: the loop, the metrics, and recipes that are known to work."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
