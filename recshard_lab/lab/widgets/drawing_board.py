"""DrawingBoard: draw any tiling of a table, see whether it is one, and run it beside the unsharded truth."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import ipywidgets as ipw

from recshard_lab.embedding.configs import EmbeddingBagConfig
from recshard_lab.lab import views
from recshard_lab.lab.compare.measure import Measured, other_programs
from recshard_lab.lab.compare.question import Answer, Question
from recshard_lab.lab.draw.theme import bytes_text, counted, ms_text, number, with_notes
from recshard_lab.lab.exporting.exportable import Candidate, Exportable, stem_of
from recshard_lab.lab.exporting.plan_report import plan_page
from recshard_lab.lab.live.live_model import EQUAL
from recshard_lab.lab.live.on_ranks import run_beside_truth
from recshard_lab.lab.live.ranks_gone import LOOK_S, BoundRanks
from recshard_lab.lab.views.registry import reason
from recshard_lab.lab.widgets import controls, page
from recshard_lab.lab.widgets.base import LabWidget
from recshard_lab.lab.widgets.export_control import ExportControl, Exports
from recshard_lab.lab.widgets.tile_canvas import TileCanvas
from recshard_lab.launcher import current
from recshard_lab.planner import Workload, estimate
from recshard_lab.sharding import EmbeddingModuleShardingPlan, PlanError, Shard, ShardingPlan, Topology, tiling
from recshard_lab.sharding.plan.tiling import Fault, find_fault
from recshard_lab.sharding.plan.types import DDR, HBM

STEPS = 6
_LINE = re.compile(
    r"\s*(?:rank\s+)?(\d+)\s*:\s*rows\s+([\d,_]+)\s*-\s*([\d,_]+)\s*,\s*cols\s+(\d+)\s*-\s*(\d+)\s*", re.I
)


class DrawingBoard(Exports, LabWidget):
    """A board for one table.

    Args:
        table: its config, pooled.
        topology: the ranks; as many as are launched when left out, or 4.
        workload: the step that is predicted and run; its optimizer is SGD when run.
        tiles: where to begin, ``(rank, (r0, r1), (c0, c1))``; the whole table on rank 0 when left out.

    Attributes:
        plan: what is drawn, or None where it is no tiling.
        problem: why it is none, with a fix.
    """

    def __init__(
        self,
        table: EmbeddingBagConfig,
        topology: Topology | None = None,
        workload: Workload | None = None,
        tiles: Sequence[tuple[int, tuple[int, int], tuple[int, int]]] | None = None,
    ) -> None:
        ranks = current()
        self.table, self.workload = table, workload or Workload(64, 3.0)
        size, local = (ranks.world_size, ranks.local_world_size) if ranks is not None else (4, 4)
        self.topology = topology or Topology(size, local_world_size=local)
        rows, cols = table.num_embeddings, table.embedding_dim
        begin = [[rank, *r, *c] for rank, r, c in tiles] if tiles is not None else [[0, 0, rows, 0, cols]]
        self.plan: ShardingPlan | None = None
        self.problem, self.last_response_ms = "", 0.0
        self.measured: Measured | None = None
        self._quiet = False
        self._over = threading.Event()
        self._running: threading.Thread | None = None
        self._fault: Fault | None = None
        self._bound: BoundRanks | None = None  # the ranks of the last run
        self._badge, self._ended = "", ""
        self._tiles, self._past = begin, list[list[list[int]]]()  # what is drawn, and what was drawn before
        self.canvas = TileCanvas(
            table.name, rows, cols, begin, self.topology.world_size, max(1, rows // 20), 4 if cols % 4 == 0 else 1
        )
        self._build()
        super().__init__(self._rows(), layout=ipw.Layout(width="100%", max_width="1180px"))
        self.add_class("recshard-plan-compare")
        self.add_class("recshard-drawing-board")
        self.respond()

    # ---- what a reader asks from Python ----

    @property
    def tiles(self) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
        """What is drawn: ``(rank, rows, cols)``."""
        return [(rank, (r0, r1), (c0, c1)) for rank, r0, r1, c0, c1 in self.canvas.tiles]

    @tiles.setter
    def tiles(self, tiles: Sequence[tuple[int, tuple[int, int], tuple[int, int]]]) -> None:
        self.canvas.tiles = [[rank, *rows, *cols] for rank, rows, cols in tiles]

    @property
    def python(self) -> str:
        """The drawing in Python."""
        lines = ["from recshard_lab.sharding import tiling", "", "cut = tiling(["]
        lines += [f"    ({rank}, {rows}, {cols})," for rank, rows, cols in self.tiles]
        return "\n".join([*lines, "])", "sharding = cut(table, topology)"])

    def run(self, steps: int = STEPS) -> dict[str, float]:
        """Trains the table under the drawn plan on the launched ranks, and unsharded beside it; how far apart.

        Raises:
            PlanError: what is drawn is no tiling. ValueError: no ranks, or too few.
        """
        if self.plan is None:
            raise PlanError(self.problem)
        ranks, wanted = current(), self.topology.world_size
        if ranks is None or ranks.world_size != wanted:
            have = "none are" if ranks is None else f"{ranks.world_size} are"
            raise ValueError(f"The drawing is for {wanted} ranks, {have} launched: %recshard_launch -n {wanted}")
        asked = self.plan
        with other_programs(ranks) as others:
            found = ranks.run(run_beside_truth, asked.to_json(), [self.table], self.workload, steps)
        outcome = {key: max(one[key] for one in found) for key in ("outputs_apart", "weights_apart", "step_ms")}
        if self.plan is asked:  # the drawing may have changed meanwhile
            self.measured = replace(Measured.of(found, steps, found[0]["backends"], ranks.times_note), others=others())
            self._bound, self._badge, self._ended = BoundRanks.of(ranks), _badge(outcome, steps, ranks.times_note), ""
            self._show()
            threading.Thread(target=self._follow, args=(self._bound,), name="recshard-board-ranks", daemon=True).start()
        return outcome

    def undo(self) -> None:
        """Takes back the last change of the drawing; without one, nothing happens."""
        if self._past:
            self._tiles = self._past.pop()
            self._quiet = True
            self.canvas.tiles = self._tiles
            self._quiet = False
            self.respond()

    def close(self) -> None:
        """Takes the widget off the page."""
        self._over.set()
        super().close()

    def exportable(self) -> Exportable:
        """What is drawn, as a plan of one table, for `export`."""
        found = None if self.plan is None else estimate(self.plan, [self.table], self.topology, self.workload)
        name = f"Drawing of {self.table.name}"
        drawn = Candidate(
            name, self.plan, [self.table], self.topology, self.workload, found, self.measured, self.problem
        )
        return replace(plan_page(drawn, python=self.python), title=name, name=name)

    # ---- building ----

    def _build(self) -> None:
        ranks = [(f"rank {rank}", rank) for rank in range(self.topology.world_size)]
        self.rank = ipw.Dropdown(options=ranks, description="Draw as", layout=ipw.Layout(width="150px"))
        self.rank.style.description_width = "initial"
        self.carves = ipw.Checkbox(value=True, description="cut away what is underneath", indent=False)
        self.carves.layout.width = "auto"
        ipw.jslink((self.rank, "index"), (self.canvas, "rank"))  # on the page: who draws at once draws as this rank
        ipw.link((self.carves, "value"), (self.canvas, "carves"))
        self.lines = ipw.Textarea(
            description="Pieces",
            tooltip="one piece a line, as in: rank 0: rows 0-500, cols 0-16",
            layout=ipw.Layout(width="calc(100% - 4px)", min_width="340px", height="190px"),
        )
        self.fix = ipw.Button(description="Apply this fix", tooltip="makes the change that is proposed", icon="wrench")
        self.back = ipw.Button(
            description="Undo", tooltip="takes back the last change; Ctrl+Z on the drawing", icon="undo"
        )
        self.back.layout.width = "100px"
        self.button = ipw.Button(description="Run it", icon="play", button_style="primary")
        self.button.tooltip = "trains the table under this plan on the ranks, beside the unsharded truth"
        self.verdict, self.status, self.badge = ipw.HTML(), ipw.HTML(), ipw.HTML()
        self.card, self.code = controls.wide_html(), controls.wide_html()
        self.exports = ExportControl(self, f"drawing_of_{stem_of(self.table.name)}")
        self.canvas.observe(lambda _: self._drawn(), names="tiles")
        self.lines.observe(lambda _: self._typed(), names="value")
        self.fix.on_click(lambda _: self._take_fix())
        self.back.on_click(lambda _: self.undo())
        self.canvas.on_msg(lambda _, message, __: self.undo() if message.get("undo") else None)
        self.button.on_click(lambda _: self._clicked())

    def _rows(self) -> list[ipw.Widget]:
        left = [controls.row([self.rank, self.carves, self.back]), self.canvas]
        right = [self.lines, self.verdict, controls.row([self.fix, self.button, self.status]), self.badge, self.card]
        return [ipw.HTML(page.STYLE), controls.halves([left, right]), controls.foot(self.exports, self.code)]

    # ---- answering ----

    def _drawn(self) -> None:
        if not self._quiet:
            self._changed()
            self.respond()

    def _changed(self) -> None:
        """Keeps what was drawn before, for `undo`."""
        tiles = [list(tile) for tile in self.canvas.tiles]
        if tiles != self._tiles:
            self._past.append(self._tiles)
            self._tiles = tiles

    def _typed(self) -> None:
        if self._quiet:
            return
        try:
            tiles = parse(self.lines.value)
        except ValueError as error:
            self.plan, self.problem, self._fault = None, str(error), None
            self.measured, self._badge, self.canvas.fault = None, "", []
            self._show()
            return
        self._quiet = True
        self.canvas.tiles = tiles
        self._quiet = False
        self._changed()
        self.respond(retype=False)

    def respond(self, retype: bool = True) -> None:
        """Says whether what is drawn is a tiling, and predicts it. Timed in ``last_response_ms``."""
        begun = perf_counter()
        self.plan, self.problem, self.measured, self._badge = None, "", None, ""
        rects = [(rows, cols) for _, rows, cols in self.tiles]
        self._fault = find_fault(rects, self.table.num_embeddings, self.table.embedding_dim)
        try:
            shards = [Shard(rank, rows, cols) for rank, rows, cols in self.tiles]
            made = tiling(shards)(self.table, self.topology)
            self.plan = ShardingPlan({"": EmbeddingModuleShardingPlan({self.table.name: made})})
            self._fault = None  # replicas of rows overlap, and are no fault
        except PlanError as error:
            self.problem = str(error)
        at = () if self._fault is None else (*self._fault.rect[0], *self._fault.rect[1])
        self.canvas.fault = list(at)
        if retype:
            self._quiet = True
            self.lines.value = "\n".join(f"rank {k}: rows {r[0]}-{r[1]}, cols {c[0]}-{c[1]}" for k, r, c in self.tiles)
            self._quiet = False
        self._show()
        self.last_response_ms = 1000 * (perf_counter() - begun)

    def _show(self) -> None:
        self.fix.disabled = self.plan is not None or self._fault is None
        self.back.disabled = not self._past
        self.button.disabled = self.plan is None
        if self.plan is None:
            self.verdict.value, self.card.value = page.alert(self.problem), ""
        else:
            pieces, ranks = len(self.tiles), len({tile[0] for tile in self.tiles})
            self.verdict.value = page.note(f"✓ A tiling: {counted(pieces, 'piece')} on {counted(ranks, 'rank')}.")
            found = estimate(self.plan, [self.table], self.topology, self.workload)
            asked = Question({}, self.topology.world_size, self.workload.batch_size, self.topology.memory_cap_bytes)
            answer = Answer(asked, self.topology, self.workload, self.plan, found)
            self.card.value = page.card("asked", answer, self.measured, stale=bool(self._ended))
        self.badge.value = page.gone(self._badge) if self._ended else self._badge
        self.canvas.told = self._told()
        self.code.value = page.code(self.python)

    def _told(self) -> list[str]:
        """Of each piece its bytes and, if there is a plan, in a second line its kernel and the memory that holds it."""
        each = self.table.data_type.bytes_per_element
        sizes = [bytes_text(each * (r[1] - r[0]) * (c[1] - c[0])) for _, r, c in self.tiles]
        if self.plan is None:
            return sizes
        sharding = self.plan.tables()[self.table.name]
        tiers = {(shard.rank, shard.rows, shard.cols): shard.tier for shard in sharding.shards}
        kernel = sharding.compute_kernel if self.measured is None else self.measured.backends[self.table.name]
        host = self.topology.compute_device == "cpu"
        lies = {HBM: "host memory" if host else "device memory", DDR: "host memory"}
        return [
            f"{size}\nkernel {kernel}, in {lies[tiers[tile]]}" for size, tile in zip(sizes, self.tiles, strict=True)
        ]

    def _take_fix(self) -> None:
        """Makes the change that the refusal proposes: moves an edge, else adds, cuts or removes a piece."""
        fault = self._fault
        if fault is None:
            return
        tiles = [list(tile) for tile in self.canvas.tiles]
        flat = [*fault.rect[0], *fault.rect[1]]
        piece = fault.positions[0] if fault.positions else len(tiles)
        if fault.fix is not None:
            tiles[piece] = [tiles[piece][0], *fault.fix[0], *fault.fix[1]]
        elif fault.kind == "hole":
            tiles.append([self.canvas.rank, *flat])
        else:  # the later piece of an overlap is on top and stays whole
            cut = without(tiles[piece], flat) if fault.kind == "overlap" else []
            tiles[piece : piece + 1] = cut
        self.canvas.tiles = tiles

    # ---- running ----

    def _follow(self, bound: BoundRanks) -> None:
        """Greys the figures of a run when its ranks end."""
        while not self._over.wait(LOOK_S) and self._bound is bound and self.measured is not None:
            if (ended := bound.ended) != self._ended:
                self._ended = ended
                self._show()
                words = f"{ended}: the measured figures are of the ranks before. Press Run it again." if ended else ""
                self.status.value = page.alert(words) if words else ""

    def _clicked(self) -> None:
        if self._running is not None and self._running.is_alive():
            return

        def work() -> None:
            try:
                self.run()
                self.status.value = ""
            except Exception as error:
                self.status.value = page.alert(reason(error))

        self.status.value = page.note("Running …")
        self._running = threading.Thread(target=work, name="recshard-drawing-board", daemon=True)
        self._running.start()

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, and for pages without a kernel what is drawn, rank by rank."""
        bundle = super()._repr_mimebundle_(**kwargs) or {}
        if self.plan is None:
            return {**bundle, "text/html": page.alert(self.problem), "text/plain": self.problem}
        view = views.placement(self.plan, [self.table], self.topology)
        return {**bundle, "text/html": view.img, "text/plain": self.lines.value}


def parse(text: str) -> list[list[int]]:
    """Pieces ``[rank, r0, r1, c0, c1]`` from lines such as ``rank 0: rows 0-500, cols 0-16``.

    Raises:
        ValueError: a line that says something else, by its number.

    >>> parse("rank 0: rows 0-1,000, cols 0-16")
    [[0, 0, 1000, 0, 16]]
    """
    tiles = []
    for place, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"line {place}, {line!r}, is no piece. A piece reads: rank 0: rows 0-500, cols 0-16")
        tiles.append([int(part.replace(",", "").replace("_", "")) for part in found.groups()])
    return tiles


def without(tile: list[int], hole: list[int]) -> list[list[int]]:
    """A piece ``[rank, r0, r1, c0, c1]`` without a rectangle ``[r0, r1, c0, c1]``, as up to four pieces.

    >>> without([0, 0, 100, 0, 16], [40, 60, 0, 16])
    [[0, 0, 40, 0, 16], [0, 60, 100, 0, 16]]
    """
    rank, r0, r1, c0, c1 = tile
    top, bottom = max(r0, min(r1, hole[0])), max(r0, min(r1, hole[1]))
    left, right = max(c0, min(c1, hole[2])), max(c0, min(c1, hole[3]))
    parts = [[rank, r0, top, c0, c1], [rank, bottom, r1, c0, c1]]
    parts += [[rank, top, bottom, c0, left], [rank, top, bottom, right, c1]]
    return [part for part in parts if part[1] < part[2] and part[3] < part[4]]


def _badge(outcome: dict[str, float], steps: int, times_note: str = "") -> str:
    """The result of running the drawn plan beside the unsharded table."""
    same = max(outcome["outputs_apart"], outcome["weights_apart"]) <= EQUAL
    sign = "✓ equal to the unsharded table" if same else "✗ not equal to the unsharded table"
    apart = f"outputs apart by {number(outcome['outputs_apart'], 2)}, weights by {number(outcome['weights_apart'], 2)}"
    style = "border:1px solid currentColor;border-radius:5px;padding:3px 9px;display:inline-block"
    took = with_notes(f"{ms_text(outcome['step_ms'])} a step.", [times_note])
    return (
        f'<div role="status" class="rs-badge" data-same="{str(same).lower()}" style="{style}"><b>{sign}</b> after '
        f"{steps} steps: {apart} of the largest. {took}</div>"
    )
