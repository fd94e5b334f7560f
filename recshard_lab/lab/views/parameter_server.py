"""Parameter server: network time of a step by number of workers, beside all-to-all."""

from __future__ import annotations

from dataclasses import replace

from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.curves import curves
from recshard_lab.lab.views.registry import register_view
from recshard_lab.planner.model.parameter_server import ServerComparison

TITLE = "Parameter server and all-to-all"


@register_view(TITLE, place=96)
def parameter_server(servers: ServerComparison, *, note: str = "", width: int = 860) -> View:
    """Milliseconds on the network by number of workers, one curve per architecture.

    Args:
        servers: what `compare_servers` returned.
        note: a sentence under the picture. Default: the condition of the comparison.
        width: of the static picture, in pixels.
    """
    if not servers.points:
        return message_view("parameter_server", TITLE, "The comparison has no number of workers.")
    last = servers.points[-1]
    first, second = sorted(last.ms, key=last.ms.__getitem__)[:2]
    told = (
        f"Computed, not measured. With {last.workers:,} workers, the shortest is {first}: {last.ms[first]:.3g} ms. "
        f"Next is {second}: {last.ms[second]:.3g} ms."
    )
    condition = (
        f"{servers.servers}. {servers.batch_size:,} samples per worker. "
        f"Links of {servers.bandwidth / 1e6:g} GB/s in each direction."
    )
    drawn = curves(
        servers.lines,
        x_label="workers",
        y_label="ms on the network",
        summary=told,
        log_y=True,
        note=note or condition,
        width=width,
    )
    return replace(drawn, name="parameter_server", title=TITLE, numbers=servers.numbers)
