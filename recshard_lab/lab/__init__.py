"""The lab: pictures of plans, widgets that answer, one-file reports. Names are loaded when first touched.

Read `draw/view.py` first (what a picture is), then one file of `views/`, then `widgets/plan_compare.py`.

>>> import recshard_lab.lab as lab
>>> "PlanCompare" in dir(lab)
True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recshard_lab.lab.compare.formats import FormatComparison as FormatComparison
    from recshard_lab.lab.compare.formats import compare_formats as compare_formats
    from recshard_lab.lab.compare.measure import Measured as Measured
    from recshard_lab.lab.compare.measure import measure_plan as measure_plan
    from recshard_lab.lab.compare.plan_comparison import PlanComparison as PlanComparison
    from recshard_lab.lab.compare.plan_comparison import compare_plans as compare_plans
    from recshard_lab.lab.draw.view import View as View
    from recshard_lab.lab.exporting.exportable import Candidate as Candidate
    from recshard_lab.lab.exporting.exporting import export as export
    from recshard_lab.lab.exporting.report import write_report as write_report
    from recshard_lab.lab.live.live_model import LiveModel as LiveModel
    from recshard_lab.lab.live.live_model import Proof as Proof
    from recshard_lab.lab.live.samples import read_counters as read_counters
    from recshard_lab.lab.live.samples import unwatch_counters as unwatch_counters
    from recshard_lab.lab.live.samples import watch_counters as watch_counters
    from recshard_lab.lab.views import register_view as register_view
    from recshard_lab.lab.views import view_named as view_named
    from recshard_lab.lab.views import view_names as view_names
    from recshard_lab.lab.widgets import DrawingBoard as DrawingBoard
    from recshard_lab.lab.widgets import LiveCounters as LiveCounters
    from recshard_lab.lab.widgets import PlanCompare as PlanCompare
    from recshard_lab.lab.widgets import RanksPanel as RanksPanel
    from recshard_lab.lab.widgets import SchemeSwitcher as SchemeSwitcher
    from recshard_lab.lab.widgets import SkewScale as SkewScale

_HOME_OF = {
    "Candidate": "exporting.exportable",
    "DrawingBoard": "widgets",
    "FormatComparison": "compare.formats",
    "LiveCounters": "widgets",
    "LiveModel": "live.live_model",
    "Measured": "compare.measure",
    "PlanCompare": "widgets",
    "PlanComparison": "compare.plan_comparison",
    "Proof": "live.live_model",
    "RanksPanel": "widgets",
    "SchemeSwitcher": "widgets",
    "SkewScale": "widgets",
    "View": "draw.view",
    "compare_formats": "compare.formats",
    "compare_plans": "compare.plan_comparison",
    "export": "exporting.exporting",
    "measure_plan": "compare.measure",
    "read_counters": "live.samples",
    "register_view": "views",
    "unwatch_counters": "live.samples",
    "view_named": "views",
    "view_names": "views",
    "watch_counters": "live.samples",
    "write_report": "exporting.report",
}

__all__ = [
    "Candidate",
    "DrawingBoard",
    "FormatComparison",
    "LiveCounters",
    "LiveModel",
    "Measured",
    "PlanCompare",
    "PlanComparison",
    "Proof",
    "RanksPanel",
    "SchemeSwitcher",
    "SkewScale",
    "View",
    "compare_formats",
    "compare_plans",
    "export",
    "measure_plan",
    "read_counters",
    "register_view",
    "unwatch_counters",
    "view_named",
    "view_names",
    "watch_counters",
    "write_report",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'recshard_lab.lab' has no attribute {name!r}")
    value = getattr(import_module(f"recshard_lab.lab.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
