"""For users of TorchRec: ``import torchrec`` gives classes of this library, and plans convert both ways.

In reading order: `torchrec` (``install()``), `served` (names and their classes here), `not_served` (nearest names),
`coverage_table`, `difference_list`, `serving` (the import hook), `translate` (CPU in place of GPUs), `plans` and
`checkpoints` (conversion), `sharding_plan` (TorchRec's defaults), `planner` (its planner and its parts), `modules`,
`models` and `optim` (adapters for these packages), `torchrec_names` (names).
"""

from ..lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
