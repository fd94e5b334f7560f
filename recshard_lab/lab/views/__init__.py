"""The views, and the registry that widgets and reports read. A new view is one file here.

A view is a pure function whose parameter names are what it shows::

    @register_view("Fullest rank")
    def fullest_rank(estimate) -> View: ...

A view with axes describes a `lab.charts.spec.Chart` with a caption for that figure and returns ``View.of_chart(...)``.
Everything that shows views (the plan comparison, a report) offers it if it has an ``estimate``.
Names in use: ``plan``, ``tables``, ``topology``, ``estimate``, ``measured``, ``losses``, ``events``, ``history``,
``search``, ``servers`` (of parameter servers), ``formats`` (of served tables), ``comparison`` (of plans), ``groups``
(sharding groups of replicas), ``sharding_groups`` (the same, where a view is of them alone), ``workload`` (the step
of the estimate), ``step`` (a recorded training step), ``memory_history``, ``codec_errors``, ``note``, ``width``,
``extent`` (of pictures to one scale).
"""

from recshard_lab.lab.draw.view import View as View
from recshard_lab.lab.views.anatomy import jagged_anatomy as jagged_anatomy
from recshard_lab.lab.views.balance import balance as balance
from recshard_lab.lab.views.counters import counters as counters
from recshard_lab.lab.views.curves import curves as curves
from recshard_lab.lab.views.follow import follow_id as follow_id
from recshard_lab.lab.views.memory import memory as memory
from recshard_lab.lab.views.memory_over_time import memory_over_time as memory_over_time
from recshard_lab.lab.views.number_formats import number_formats as number_formats
from recshard_lab.lab.views.overflow import overflow as overflow
from recshard_lab.lab.views.parameter_server import parameter_server as parameter_server
from recshard_lab.lab.views.pareto import pareto as pareto
from recshard_lab.lab.views.phases import phases as phases
from recshard_lab.lab.views.placement import placement as placement
from recshard_lab.lab.views.planner_search import planner_search as planner_search
from recshard_lab.lab.views.registry import draw as draw
from recshard_lab.lab.views.registry import draw_alike as draw_alike
from recshard_lab.lab.views.registry import register_view as register_view
from recshard_lab.lab.views.registry import unregister_view as unregister_view
from recshard_lab.lab.views.registry import view_label as view_label
from recshard_lab.lab.views.registry import view_named as view_named
from recshard_lab.lab.views.registry import view_names as view_names
from recshard_lab.lab.views.registry import views_of as views_of
from recshard_lab.lab.views.replica_grid import replica_grid as replica_grid
from recshard_lab.lab.views.side_by_side import side_by_side as side_by_side
from recshard_lab.lab.views.skew import access_skew as access_skew
from recshard_lab.lab.views.step_frames import step_frames as step_frames
from recshard_lab.lab.views.timeline import timeline as timeline
from recshard_lab.lab.views.traffic import traffic as traffic
from recshard_lab.lab.views.waterfall import waterfall as waterfall
from recshard_lab.lab.views.wire_formats import wire_formats as wire_formats
