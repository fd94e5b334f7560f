"""For readers who come from TorchRec: its import names answered by this library, and plans both ways.

Read first: `torchrec` (``install()``), then `served` (which name is which class here).
"""
