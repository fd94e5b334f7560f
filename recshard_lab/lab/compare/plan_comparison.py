"""Several plans of the same tables side by side: numbers, the best of each row, what differs. No widget here.

`compare_plans` is what the widgets show and what the Python under them calls; a `PlanComparison` prints as a table and
shows itself in a notebook without a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding.configs import BaseEmbeddingConfig, check_tables
from recshard_lab.lab.compare.measure import Measured
from recshard_lab.lab.compare.question import Answer, Question, answer, searched
from recshard_lab.lab.draw.theme import bytes_text, ms_text
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import draw_alike, view_label, views_of
from recshard_lab.planner import EmbeddingShardingPlanner, PlanDiff, Workload
from recshard_lab.sharding import ParameterConstraints, PlanError, ShardingPlan, Topology, scheme_names
from recshard_lab.sharding.plan.types import nearest
from recshard_lab.text_table import TextTable

if TYPE_CHECKING:
    from recshard_lab.lab.exporting.exportable import Exportable

PLANNER = "planner"
KNOWN = ("plan", "tables", "topology", "estimate", "measured", "width", "search")
SEARCHED = ("planner_search",)  # views for which the planner searches again
SAME = 5e-3  # values that differ by a smaller share are equally good
_OPTIONS = {"solver": "greedy", "time_limit_s": 60.0, "cost_model": "recshard", "route": None, "local_search_passes": 3}

Wish: TypeAlias = "ShardingPlan | EmbeddingShardingPlanner | str | Mapping[str, str | ParameterConstraints]"


@dataclass(frozen=True)
class Row:
    """One line of the comparison: what is compared, read off an answer; smaller is better.

    Attributes:
        name: of the value, in records; label: as a reader sees it; hint: what it is, in a sentence.
        text: how the value is written.
    """

    name: str
    label: str
    hint: str
    value: Callable[[Answer], float]
    text: Callable[[float], str]


def fullest(shown: Answer) -> float:
    """Bytes that the fullest rank holds."""
    assert shown.estimate is not None
    return shown.estimate.fullest_bytes


def _sent(shown: Answer) -> float:
    assert shown.estimate is not None
    return float(shown.estimate.traffic_bytes.sum() - shown.estimate.traffic_bytes.trace())


def _imbalance(shown: Answer) -> float:
    assert shown.estimate is not None
    busy = shown.estimate.ms.sum(axis=1)
    return float(busy.max() / busy.mean()) if busy.mean() > 0 else 1.0


def _step(shown: Answer) -> float:
    assert shown.estimate is not None
    return shown.estimate.step_ms


def _times(value: float) -> str:
    return f"{value:.2f} x the mean"


ROWS = (
    Row("step_ms", "Step", "predicted milliseconds of one training step", _step, ms_text),
    Row("memory_bytes", "Fullest rank", "bytes that the fullest rank holds", fullest, bytes_text),
    Row("sent_bytes", "Sent in a step", "bytes that go from one rank to another in a step", _sent, bytes_text),
    Row("imbalance", "Busiest rank", "work of the busiest rank in a step, against the mean of all", _imbalance, _times),
)


@dataclass(frozen=True, eq=False)
class PlanComparison:
    """What `compare_plans` found; `print` it.

    Attributes:
        tables: the configs.
        answers: name of the plan -> its question, plan, estimate and, where it does not fit, the reason.
        measured: name -> what launched ranks reported, of the plans that were run.
    """

    tables: Sequence[BaseEmbeddingConfig]
    answers: Mapping[str, Answer]
    measured: Mapping[str, Measured] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Answer:
        """The answer of one plan.

        Raises:
            ValueError: there is none of this name.
        """
        if name not in self.answers:
            raise ValueError(f"there is no plan {name!r}{nearest(str(name), self.answers)}; {self._names}")
        return self.answers[name]

    @property
    def _names(self) -> str:
        return f"plans: {', '.join(self.answers)}"

    @cached_property
    def values(self) -> dict[str, dict[str, float]]:
        """Name of the plan -> name of the row -> value; nothing where there is no plan."""
        found = {name: shown for name, shown in self.answers.items() if shown.estimate is not None}
        return {name: {row.name: row.value(shown) for row in ROWS} for name, shown in found.items()}

    @cached_property
    def best(self) -> dict[str, set[str]]:
        """Name of the row -> the plans with its best value, of those that fit; none where all are equally good."""
        fit = {name: each for name, each in self.values.items() if self.answers[name].fits}
        found: dict[str, set[str]] = {}
        for row in ROWS:
            least = min((each[row.name] for each in fit.values()), default=0.0)
            good = {name for name, each in fit.items() if each[row.name] <= least * (1 + SAME)}
            found[row.name] = good if len(good) < len(self.answers) else set()
        return found

    def diff(self, name: str, baseline: str) -> PlanDiff:
        """What changes from the plan `baseline` to the plan `name`: see `ShardingPlan.diff`.

        Raises:
            ValueError: there is no such plan. PlanError: one of them cannot be, or they are for other ranks.
        """
        before, after = self[baseline], self[name]
        for which, shown in ((baseline, before), (name, after)):
            if shown.plan is None:
                raise PlanError(f"{which}: {shown.problem}")
        assert before.plan is not None
        assert after.plan is not None
        knows = [EmbeddingShardingPlanner(each.topology, workload=each.workload) for each in (before, after)]
        mine, theirs = (
            planner.record(plan, self.tables) for planner, plan in zip(knows, (before.plan, after.plan), strict=True)
        )
        return mine.diff(before.plan, after.plan, theirs)

    @property
    def searched(self) -> bool:
        """Whether `search` has been called for all plans, here or by whoever holds the same answers."""
        return all(shown.searched for shown in self.answers.values())

    def search(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Plans again with everything kept that the planner looks at, for `views`; a fifth of a second for 26 tables.

        Args:
            wanted: asked before each plan whether to go on.
        """
        for shown in self.answers.values():
            if not wanted():
                return
            searched(shown, self.tables)

    def views(self, name: str, width: int = 500) -> dict[str, View]:
        """Name of the plan -> one of the registered views of it, all to one scale.

        Raises:
            ValueError: no such view.
        """
        if name in SEARCHED:
            self.search()
        known = {
            plan: {
                "plan": shown.plan,
                "tables": self.tables,
                "topology": shown.topology,
                "estimate": shown.estimate,
                "measured": self.measured.get(plan),
                "search": shown.search,
                "width": width,
            }
            for plan, shown in self.answers.items()
            if shown.plan is not None and shown.estimate is not None
        }
        drawn = dict(zip(known, draw_alike(name, list(known.values())), strict=True))
        return {
            plan: drawn[plan] if plan in drawn else message_view(name, view_label(name), shown.problem)
            for plan, shown in self.answers.items()
        }

    def exportable(self, python: str = "") -> Exportable:
        """What `lab.export` writes of it."""
        from recshard_lab.lab.exporting.exportable import Candidate
        from recshard_lab.lab.exporting.plan_report import comparison_page

        candidates = [
            Candidate(name, a.plan, self.tables, a.topology, a.workload, a.estimate, self.measured.get(name), a.problem)
            for name, a in self.answers.items()
        ]
        return comparison_page(candidates, python=python, name="plan_comparison")

    def records(self) -> list[dict[str, Any]]:
        """One dict a plan."""
        found = []
        for name, shown in self.answers.items():
            ran = self.measured.get(name)
            found.append(
                {
                    "plan": name,
                    **{row.name: self.values.get(name, {}).get(row.name) for row in ROWS},
                    "fits": shown.fits,
                    "problem": shown.problem,
                    "measured_ms": None if ran is None else ran.step_ms,
                    "measured_memory_bytes": None if ran is None else float(ran.memory_bytes.sum(axis=1).max()),
                }
            )
        return found

    @property
    def numbers(self) -> TextTable:
        """The table: a line a row, a column a plan; the best of a line says so."""
        lines = [[row.label, *(self._cell(row, name) for name in self.answers)] for row in ROWS]
        fits = ["Memory", *("fits" if shown.fits else "does not fit" for shown in self.answers.values())]
        ran = [self.measured.get(name) for name in self.answers]
        notes = "".join(f" ({note})" for note in dict.fromkeys(one.times_note for one in ran if one) if note)
        more = (
            [[f"Step, measured{notes}", *("" if one is None else ms_text(one.step_ms) for one in ran)]]
            if any(ran)
            else []
        )
        return TextTable(["", *self.answers], [*lines, *more, fits])

    def _cell(self, row: Row, name: str) -> str:
        if name not in self.values:
            return "no plan"
        return row.text(self.values[name][row.name]) + (" (best)" if name in self.best[row.name] else "")

    @property
    def text(self) -> str:
        """The numbers, and why a plan does not fit, as plain text."""
        problems = [f"{name}: {shown.problem}" for name, shown in self.answers.items() if shown.problem]
        return "\n".join([self.numbers.text, *problems])

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.numbers.html + "".join(view.img for view in self.views("placement", 420).values())


@names_wrong_arguments
def compare_plans(
    tables: Sequence[BaseEmbeddingConfig],
    topology: Topology,
    plans: Mapping[str, Wish],
    workload: Workload | None = None,
) -> PlanComparison:
    """Predicts several plans of the same tables for the same ranks and the same step.

    Args:
        tables: the configs.
        topology: the ranks.
        plans: name -> what it is: "planner"; a scheme, which all tables get; table -> scheme or
            `ParameterConstraints`, the other tables left to the planner; an `EmbeddingShardingPlanner`, of which the
            constraints, solver, route and cost model are taken; or a `ShardingPlan`, which is predicted as it is.
        workload: the step; `Workload()` when left out.

    Raises:
        ValueError: no plans, a plan that is nothing of these, or a table or scheme that does not exist. A plan that
            does not fit is no error: its answer says why.

    >>> from recshard_lab.embedding.configs import EmbeddingBagConfig
    >>> movies = EmbeddingBagConfig(name="movies", num_embeddings=10**6, embedding_dim=64, feature_names=["movie"])
    >>> found = compare_plans([movies], Topology(2), {"mine": "row_wise", "planned": "planner"})
    >>> found["mine"].plan.tables()["movies"].sharding_type, found.best["memory_bytes"]
    ('row_wise', {'mine'})
    """
    check_tables(tables)
    if not isinstance(topology, Topology):
        raise ValueError(f"topology must be a Topology, got {topology!r:.80}")
    workload = Workload() if workload is None else workload
    if not isinstance(workload, Workload):
        raise ValueError(f"workload must be a Workload, got {workload!r:.80}")
    asked = {name: question_of(wish, tables, topology, workload) for name, wish in named(plans).items()}
    return PlanComparison(
        list(tables), {name: answer(question, tables, topology, workload) for name, question in asked.items()}
    )


def named(plans: Mapping[str, Wish]) -> dict[str, Wish]:
    """`plans`, checked to be a mapping of names.

    Raises:
        ValueError: it is not, or is empty.
    """
    if not isinstance(plans, Mapping) or not plans:
        raise ValueError(f"plans must map a name to each plan, as in {{'planned': 'planner'}}, got {plans!r:.80}")
    for name in plans:
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"the name of a plan must be a text that is not empty, got {name!r:.80}")
    return dict(plans)


def question_of(wish: Wish, tables: Sequence[BaseEmbeddingConfig], topology: Topology, workload: Workload) -> Question:
    """What is asked for one of `compare_plans`'s plans.

    Raises:
        ValueError: as `compare_plans`.
    """
    base = Question({}, topology.world_size, workload.batch_size, topology.memory_cap_bytes)
    names = [table.name for table in tables]
    if isinstance(wish, ShardingPlan):
        return replace(base, plan=wish)
    if isinstance(wish, EmbeddingShardingPlanner):
        options = {name: getattr(wish, name) for name, usual in _OPTIONS.items() if getattr(wish, name) != usual}
        _check_names(wish.constraints, names)
        return replace(base, constraints=dict(wish.constraints), options=options)
    if isinstance(wish, str):
        return base if wish == PLANNER else replace(base, schemes=dict.fromkeys(names, checked_scheme(wish)))
    if not isinstance(wish, Mapping):
        raise ValueError(
            f"a plan is a ShardingPlan, an EmbeddingShardingPlanner, 'planner', a scheme, or table -> scheme, "
            f"got {wish!r:.80}"
        )
    _check_names(wish, names)
    constraints = {name: value for name, value in wish.items() if isinstance(value, ParameterConstraints)}
    schemes = {name: checked_scheme(value) for name, value in wish.items() if name not in constraints}
    return replace(base, schemes=schemes, constraints=constraints)


def checked_scheme(scheme: Any) -> str:
    """The name of a scheme, or "auto".

    Raises:
        ValueError: there is none of this name.
    """
    known = ["auto", *scheme_names()]
    name = getattr(scheme, "value", scheme)
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"there is no scheme {name!r:.80}; schemes: {', '.join(known)}")
    return name


def _check_names(given: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in given:
        if name not in names:
            raise ValueError(f"there is no table {name!r:.80}{nearest(str(name), names)}; tables: {', '.join(names)}")


def views_of_plans() -> list[str]:
    """The registered views that a plan and its estimate suffice for."""
    return views_of(*KNOWN)
