"""The lab: pictures of plans, widgets that answer, one-file reports. Names are loaded when first touched.

Read `draw/view.py` first (what a picture is), then one file of `views/`, then `widgets/plan_compare.py`.

>>> from recshard_lab import lab
>>> "PlanCompare" in dir(lab)
True
"""

from ..lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
