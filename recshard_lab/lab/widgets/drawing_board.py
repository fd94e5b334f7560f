"""DrawingBoard: draw a tiling of a table, see whether it is valid, and run it beside the unsharded table."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import ipywidgets as ipw
import numpy as np

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
from recshard_lab.lab.widgets import controls, page
from recshard_lab.lab.widgets.base import LabWidget
from recshard_lab.lab.widgets.components import TileCanvas
from recshard_lab.launcher import current
from recshard_lab.planner import Workload, estimate
from recshard_lab.sharding import EmbeddingModuleShardingPlan, PlanError, Shard, ShardingPlan, Topology, tiling
from recshard_lab.sharding.plan.tiling import Fault, find_fault
from recshard_lab.sharding.plan.types import DDR, HBM

STEPS = 6
_LINE = re.compile(
    r"\s*(?:rank\s+)?(\d+)\s*:\s*rows\s+([\d,_]+)\s*-\s*([\d,_]+)\s*,\s*cols\s+(\d+)\s*-\s*(\d+)\s*", re.I
)


class DrawingBoard(LabWidget):
    """A board for one table.

    Args:
        table: its config, pooled.
        topology: the ranks; by default as many as are launched, or 4.
        workload: the step that is predicted and run; a run uses SGD.
        tiles: the first drawing, ``(rank, (r0, r1), (c0, c1))`` per shard; by default the whole table on rank 0.

    Attributes:
        plan: the drawn plan; None if the drawing is not a tiling.
        problem: why it is not, with a fix.
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
        self.workload.check_names([table])
        size, local = (ranks.world_size, ranks.local_world_size) if ranks is not None else (4, 4)
        self.topology = topology or Topology(size, local_world_size=local)
        rows, cols = table.num_embeddings, table.embedding_dim
        first = [[rank, *r, *c] for rank, r, c in tiles] if tiles is not None else [[0, 0, rows, 0, cols]]
        self.plan: ShardingPlan | None = None
        self.problem, self.last_response_ms = "", 0.0
        self.measured: Measured | None = None
        self._fault: Fault | None = None
        self._bound: BoundRanks | None = None  # the ranks of the last run
        self._badge, self._ended = "", ""
        self._tiles, self._past = first, list[list[list[int]]]()  # the drawing, and earlier drawings
        self.canvas = TileCanvas(
            table.name, rows, cols, first, self.topology.world_size, max(1, rows // 20), 4 if cols % 4 == 0 else 1
        )
        super().__init__("drawing-board", f"drawing_of_{stem_of(table.name)}")
        self._build()
        self.respond()

    # ---- for use from Python ----

    @property
    def tiles(self) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
        """The drawn shards: ``(rank, rows, cols)``."""
        return [(rank, (r0, r1), (c0, c1)) for rank, r0, r1, c0, c1 in self.canvas.tiles]

    @tiles.setter
    def tiles(self, tiles: Sequence[tuple[int, tuple[int, int], tuple[int, int]]]) -> None:
        self.canvas.tiles = [[rank, *rows, *cols] for rank, rows, cols in tiles]

    @property
    def python(self) -> str:
        """The drawing in Python."""
        lines = ["import recshard_lab as rs", "", "scheme = rs.sharding.tiling(["]
        lines += [f"    ({rank}, {rows}, {cols})," for rank, rows, cols in self.tiles]
        return "\n".join([*lines, "])", "sharding = scheme(table, topology)"])

    def run(self, steps: int = STEPS) -> dict[str, float]:
        """Trains the table under the drawn plan on the launched ranks, and unsharded on each rank.

        Returns:
            ``outputs_apart``, ``weights_apart`` (relative differences) and ``step_ms``, each the largest of the ranks.

        Raises:
            PlanError: the drawing is not a tiling.
            ValueError: no ranks are launched, or another number than the drawing has.
        """
        if self.plan is None:
            raise PlanError(self.problem)
        ranks, needed = current(), self.topology.world_size
        if ranks is None or ranks.world_size != needed:
            launched = "none are" if ranks is None else f"{ranks.world_size} {'is' if ranks.world_size == 1 else 'are'}"
            raise ValueError(
                f"The drawing is for {counted(needed, 'rank')}, {launched} launched. Fix: %recshard_launch -n {needed}"
            )
        plan = self.plan
        with other_programs(ranks) as others:
            found = ranks.run(run_beside_truth, plan.to_json(), [self.table], self.workload, steps)
        # np.max keeps a NaN of any rank
        outcome = {key: float(np.max([x[key] for x in found])) for key in ("outputs_apart", "weights_apart", "step_ms")}
        if self.plan is plan:  # the drawing may have changed meanwhile
            self.measured = replace(Measured.of(found, steps, found[0]["backends"], ranks.times_note), others=others())
            self._bound, self._badge, self._ended = BoundRanks.of(ranks), _badge(outcome, steps, ranks.times_note), ""
            self._show()
            self.worker.newest(self._follow, "look", LOOK_S)
        return outcome

    def undo(self) -> None:
        """Undoes the last change of the drawing, if any."""
        if self._past:
            self._tiles = self._past.pop()
            with self.quietly():
                self.canvas.tiles = self._tiles
            self.respond()

    def exportable(self) -> Exportable:
        """The drawing as a plan of one table, for `export`."""
        found = None if self.plan is None else estimate(self.plan, [self.table], self.topology, self.workload)
        name = f"Drawing of {self.table.name}"
        drawn = Candidate(
            name, self.plan, [self.table], self.topology, self.workload, found, self.measured, self.problem
        )
        return replace(plan_page(drawn, python=self.python), title=name, name=name)

    # ---- building ----

    def _build(self) -> None:
        ranks = [(f"rank {rank}", rank) for rank in range(self.topology.world_size)]
        self.rank = controls.pick("Draw as", "the rank of the next shard", ranks, "150px")
        self.overwrites = controls.tick("cut away what is underneath", "removes what a new shard covers")
        ipw.jslink((self.rank, "index"), (self.canvas, "rank"))  # in the browser, without a message to the kernel
        ipw.link((self.overwrites, "value"), (self.canvas, "overwrites"))
        self.lines = ipw.Textarea(
            description="Shards",
            tooltip="one shard per line: rank 0: rows 0-500, cols 0-16",
            layout=ipw.Layout(width="calc(100% - 4px)", min_width="min(340px, 100% - 4px)", height="190px"),
        )
        self.fix = controls.button("Apply this fix", "makes the proposed change", "wrench", width="148px")
        self.back = controls.button("Undo", "undoes the last change; Ctrl+Z on the drawing", "undo", width="100px")
        hint = "trains the table under this plan on the ranks, beside the unsharded table"
        self.button = controls.button("Run it", hint, "play", "primary", "148px")
        self.verdict, self.badge, self.card = ipw.HTML(), ipw.HTML(), controls.wide_html()
        self.on(self.canvas, lambda _: self._drawn(), "tiles")
        self.on(self.lines, self._typed)
        self.fix.on_click(lambda _: self._apply_fix())
        self.back.on_click(lambda _: self.undo())
        self.canvas.on_msg(lambda _, message, __: self.undo() if message.get("undo") else None)
        self.button.on_click(lambda _: self.run_in_background(self._run, "Running …", "run"))
        left = [controls.row([self.rank, self.overwrites, self.back]), self.canvas]
        right = [self.lines, self.verdict, controls.row([self.fix, self.button, self.message]), self.badge, self.card]
        self.lay_out([controls.halves([left, right])])

    # ---- answering ----

    def _drawn(self) -> None:
        self._record()
        self.respond()

    def _record(self) -> None:
        """Stores the drawing before the change, for `undo`."""
        tiles = [list(tile) for tile in self.canvas.tiles]
        if tiles != self._tiles:
            self._past.append(self._tiles)
            self._tiles = tiles

    def _typed(self, text: str) -> None:
        try:
            tiles = parse(text)
        except ValueError as error:
            self.plan, self.problem, self._fault = None, str(error), None
            self.measured, self._badge, self.canvas.fault = None, "", []
            self._show()
            return
        with self.quietly():
            self.canvas.tiles = tiles
        self._record()
        self.respond(retype=False)

    def respond(self, retype: bool = True) -> None:
        """Checks the drawing and predicts it. Its time is ``last_response_ms``.

        Args:
            retype: writes the drawing into the text field.
        """
        begun = perf_counter()
        self.plan, self.problem, self.measured, self._badge = None, "", None, ""
        rects = [(rows, cols) for _, rows, cols in self.tiles]
        self._fault = find_fault(rects, self.table.num_embeddings, self.table.embedding_dim)
        try:
            shards = [Shard(rank, rows, cols) for rank, rows, cols in self.tiles]
            sharding = tiling(shards)(self.table, self.topology)
            self.plan = ShardingPlan({"": EmbeddingModuleShardingPlan({self.table.name: sharding})})
            self._fault = None  # replicas of rows overlap and are valid
        except PlanError as error:
            self.problem = str(error)
        at = () if self._fault is None else (*self._fault.rect[0], *self._fault.rect[1])
        self.canvas.fault = list(at)
        if retype:
            with self.quietly():
                self.lines.value = "\n".join(
                    f"rank {k}: rows {r[0]}-{r[1]}, cols {c[0]}-{c[1]}" for k, r, c in self.tiles
                )
        self._show()
        self.last_response_ms = 1000 * (perf_counter() - begun)

    def _show(self) -> None:
        self.fix.disabled = self.plan is not None or self._fault is None
        self.back.disabled = not self._past
        self.button.disabled = self.plan is None
        if self.plan is None:
            self.verdict.value, self.card.value = page.alert(self.problem), ""
        else:
            shards, ranks = len(self.tiles), len({tile[0] for tile in self.tiles})
            self.verdict.value = page.note(f"✓ A tiling: {counted(shards, 'shard')} on {counted(ranks, 'rank')}.")
            found = estimate(self.plan, [self.table], self.topology, self.workload)
            question = Question({}, self.topology.world_size, self.workload.batch_size, self.topology.memory_cap_bytes)
            answer = Answer(question, self.topology, self.workload, self.plan, found)
            self.card.value = page.card("asked", answer, self.measured, stale=bool(self._ended))
        self.badge.value = page.gone(self._badge) if self._ended else self._badge
        self.canvas.details = self._details()
        self.code.value = page.code(self.python)

    def _details(self) -> list[str]:
        """Each shard's bytes and, for a valid plan, a second line with its kernel and memory."""
        size = self.table.data_type.bytes_per_element
        sizes = [bytes_text(size * (r[1] - r[0]) * (c[1] - c[0])) for _, r, c in self.tiles]
        if self.plan is None:
            return sizes
        sharding = self.plan.tables()[self.table.name]
        tiers = {(shard.rank, shard.rows, shard.cols): shard.tier for shard in sharding.shards}
        kernel = sharding.compute_kernel if self.measured is None else self.measured.backends[self.table.name]
        on_host = self.topology.compute_device == "cpu"
        memory = {HBM: "host memory" if on_host else "device memory", DDR: "host memory"}
        return [
            f"{size}\nkernel {kernel}, in {memory[tiers[tile]]}" for size, tile in zip(sizes, self.tiles, strict=True)
        ]

    def _apply_fix(self) -> None:
        """Makes the change that the error proposes: moves an edge, else adds, cuts or removes a shard."""
        fault = self._fault
        if fault is None:
            return
        tiles = [list(tile) for tile in self.canvas.tiles]
        flat = [*fault.rect[0], *fault.rect[1]]
        place = fault.positions[0] if fault.positions else len(tiles)
        if fault.fix is not None:
            tiles[place] = [tiles[place][0], *fault.fix[0], *fault.fix[1]]
        elif fault.kind == "hole":
            tiles.append([self.canvas.rank, *flat])
        else:  # the later shard of an overlap is on top and stays whole
            tiles[place : place + 1] = without(tiles[place], flat) if fault.kind == "overlap" else []
        self.canvas.tiles = tiles

    # ---- running ----

    def _run(self) -> None:
        self.run()

    def _follow(self, is_current: Callable[[], bool]) -> None:
        """Greys the figures of a run when its ranks end."""
        bound = self._bound
        if bound is None or self.measured is None or not is_current():
            return
        if (ended := bound.ended) != self._ended:
            self._ended = ended
            self._show()
            words = f"{ended}: these figures were measured on the ranks before. Press Run it again."
            self.message.fail(words) if ended else self.message.show()
        self.worker.newest(self._follow, "look", LOOK_S)

    def static(self) -> tuple[str, str]:
        """The drawing, rank by rank."""
        if self.plan is None:
            return page.alert(self.problem), self.problem
        return views.placement(self.plan, [self.table], self.topology).img, str(self.lines.value)


def parse(text: str) -> list[list[int]]:
    """Shards ``[rank, r0, r1, c0, c1]`` from lines such as ``rank 0: rows 0-500, cols 0-16``.

    Raises:
        ValueError: a line of another form, with its number.

    >>> parse("rank 0: rows 0-1,000, cols 0-16")
    [[0, 0, 1000, 0, 16]]
    """
    tiles = []
    for place, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"line {place}, {line!r}, is not a shard. Fix: write rank 0: rows 0-500, cols 0-16")
        tiles.append([int(part.replace(",", "").replace("_", "")) for part in found.groups()])
    return tiles


def without(tile: list[int], hole: list[int]) -> list[list[int]]:
    """A shard ``[rank, r0, r1, c0, c1]`` without a rectangle ``[r0, r1, c0, c1]``, as up to four shards.

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
    apart = float(np.max([outcome["outputs_apart"], outcome["weights_apart"]]))
    same = apart <= EQUAL
    head = "equal to the unsharded table" if same else "not equal to the unsharded table"
    outputs, weights = (number(outcome[name], 2) for name in ("outputs_apart", "weights_apart"))
    took = with_notes(f"{ms_text(outcome['step_ms'])} per step.", [times_note])
    words = f" after {steps} steps: outputs differ by {outputs} of the largest, weights by {weights}. {took}"
    return page.badge(same, head, words, apart)
