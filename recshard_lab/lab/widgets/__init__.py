"""Widgets: controls over the views. Only code that uses the names below needs ipywidgets.

- `base.py`, `worker.py`: what all widgets share, and their background work
- `components.py`, `static/`: the parts with JavaScript, and their scripts and style sheets
- `chart_box.py`, `chart_figure.py`: a view on the page, charts as live figures of plotly
- `controls.py`, `page.py`, `export_control.py`: controls and boxes, written parts, the Export control
- one file per widget; `plan_columns.py` is a part of `plan_compare.py`
"""

from recshard_lab.lab.widgets.drawing_board import DrawingBoard as DrawingBoard
from recshard_lab.lab.widgets.live_counters import LiveCounters as LiveCounters
from recshard_lab.lab.widgets.plan_compare import PlanCompare as PlanCompare
from recshard_lab.lab.widgets.ranks_panel import RanksPanel as RanksPanel
from recshard_lab.lab.widgets.scheme_switcher import SchemeSwitcher as SchemeSwitcher
from recshard_lab.lab.widgets.skew_scale import SkewScale as SkewScale
from recshard_lab.lab.widgets.step_through import StepThrough as StepThrough
