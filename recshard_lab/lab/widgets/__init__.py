"""Widgets: controls over the views. Only what is imported from here needs ipywidgets."""

from recshard_lab.lab.widgets.drawing_board import DrawingBoard as DrawingBoard
from recshard_lab.lab.widgets.live_counters import LiveCounters as LiveCounters
from recshard_lab.lab.widgets.plan_compare import PlanCompare as PlanCompare
from recshard_lab.lab.widgets.ranks_panel import RanksPanel as RanksPanel
from recshard_lab.lab.widgets.scheme_switcher import SchemeSwitcher as SchemeSwitcher
from recshard_lab.lab.widgets.skew_scale import SkewScale as SkewScale
from recshard_lab.lab.widgets.step_through import StepThrough as StepThrough
