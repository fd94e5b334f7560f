"""The lab: pictures of plans, widgets that answer, one-file reports. Names are loaded when first touched.

Read `view.py` first (what a picture is), then one file of `views/`, then `widgets/plan_compare.py`.

>>> import recshard_lab.lab as lab
>>> "PlanCompare" in dir(lab)
True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recshard_lab.lab.exportable import Candidate as Candidate
    from recshard_lab.lab.exporting import export as export
    from recshard_lab.lab.live_model import LiveModel as LiveModel
    from recshard_lab.lab.live_model import Proof as Proof
    from recshard_lab.lab.measure import Measured as Measured
    from recshard_lab.lab.measure import measure_plan as measure_plan
    from recshard_lab.lab.number_formats import FormatComparison as FormatComparison
    from recshard_lab.lab.number_formats import compare_formats as compare_formats
    from recshard_lab.lab.plan_comparison import PlanComparison as PlanComparison
    from recshard_lab.lab.plan_comparison import compare_plans as compare_plans
    from recshard_lab.lab.report import write_report as write_report
    from recshard_lab.lab.view import View as View
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
    "Candidate": "exportable",
    "DrawingBoard": "widgets",
    "FormatComparison": "number_formats",
    "LiveCounters": "widgets",
    "LiveModel": "live_model",
    "Measured": "measure",
    "PlanCompare": "widgets",
    "PlanComparison": "plan_comparison",
    "Proof": "live_model",
    "RanksPanel": "widgets",
    "SchemeSwitcher": "widgets",
    "SkewScale": "widgets",
    "View": "view",
    "compare_formats": "number_formats",
    "compare_plans": "plan_comparison",
    "export": "exporting",
    "measure_plan": "measure",
    "register_view": "views",
    "view_named": "views",
    "view_names": "views",
    "write_report": "report",
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
    "register_view",
    "view_named",
    "view_names",
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
