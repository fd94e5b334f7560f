"""For readers who come from TorchRec: its import names answered by this library, and plans both ways.

Read first: `torchrec` (``install()``), then `served` (which name is which class here).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
