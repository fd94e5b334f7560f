"""Several plans of the same tables side by side: numbers, the best of each row, differences. No widget here.

The widgets and their Python call `compare_plans`. A `PlanComparison` prints as a table, and a notebook shows it without
a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding.configs import BaseEmbeddingConfig, check_tables
from recshard_lab.lab.compare.measure import Measured
from recshard_lab.lab.compare.question import Answer, Question, answer, constraints_of, searched
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
KNOWN = ("plan", "tables", "topology", "workload", "estimate", "measured", "width", "search")
SEARCHED = ("planner_search",)  # views for which the planner searches again
SAME = 5e-3  # values that differ by a smaller share are equally good
_OPTIONS = {"solver": "greedy", "time_limit_s": 60.0, "cost_model": "recshard", "route": None, "local_search_passes": 3}

PlanSpec: TypeAlias = "ShardingPlan | EmbeddingShardingPlanner | str | Mapping[str, str | ParameterConstraints]"


@dataclass(frozen=True)
class Row:
    """One line of the comparison: a number of an answer. Smaller is better.

    Attributes:
        name: of the value, in records; label: as shown; hint: its definition.
        value: computes it; text: formats it.
    """

    name: str
    label: str
    hint: str
    value: Callable[[Answer], float]
    text: Callable[[float], str]


def fullest(shown: Answer) -> float:
    """Bytes on the fullest rank."""
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
    Row("memory_bytes", "Fullest rank", "bytes on the fullest rank", fullest, bytes_text),
    Row("sent_bytes", "Sent in a step", "bytes sent from one rank to another in a step", _sent, bytes_text),
    Row("imbalance", "Busiest rank", "work of the busiest rank in a step, against the mean of all", _imbalance, _times),
)


@dataclass(frozen=True, eq=False)
class PlanComparison:
    """The result of `compare_plans`; `print` it.

    Attributes:
        tables: the configs.
        answers: name of the plan -> its question, plan, estimate and, if it does not fit, the reason.
        measured: name -> measurement, for the plans that ran on ranks.
    """

    tables: Sequence[BaseEmbeddingConfig]
    answers: Mapping[str, Answer]
    measured: Mapping[str, Measured] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Answer:
        """The answer of one plan.

        Raises:
            ValueError: an unknown name.
        """
        if name not in self.answers:
            raise ValueError(f"unknown plan {name!r}{nearest(str(name), self.answers)}; {self._names}")
        return self.answers[name]

    @property
    def _names(self) -> str:
        return f"plans: {', '.join(self.answers)}"

    @cached_property
    def values(self) -> dict[str, dict[str, float]]:
        """Name of the plan -> name of the row -> value, for plans with an estimate."""
        found = {name: shown for name, shown in self.answers.items() if shown.estimate is not None}
        return {name: {row.name: row.value(shown) for row in ROWS} for name, shown in found.items()}

    @cached_property
    def best(self) -> dict[str, set[str]]:
        """Name of the row -> the fitting plans with its best value; empty if all are equally good."""
        fit = {name: each for name, each in self.values.items() if self.answers[name].fits}
        found: dict[str, set[str]] = {}
        for row in ROWS:
            least = min((each[row.name] for each in fit.values()), default=0.0)
            good = {name for name, each in fit.items() if each[row.name] <= least * (1 + SAME)}
            found[row.name] = good if len(good) < len(self.answers) else set()
        return found

    def diff(self, name: str, baseline: str) -> PlanDiff:
        """The changes from the plan `baseline` to the plan `name`: see `ShardingPlan.diff`.

        Raises:
            ValueError: an unknown name. PlanError: one of them has no plan, or they are for different ranks.
        """
        before, after = self[baseline], self[name]
        for which, shown in ((baseline, before), (name, after)):
            if shown.plan is None:
                raise PlanError(f"{which}: {shown.problem}")
        assert before.plan is not None
        assert after.plan is not None
        names = [table.name for table in self.tables]
        knows = [
            EmbeddingShardingPlanner(
                each.topology, constraints=constraints_of(each.question, names), workload=each.workload
            )
            for each in (before, after)
        ]
        mine, theirs = (
            planner.record(plan, self.tables) for planner, plan in zip(knows, (before.plan, after.plan), strict=True)
        )
        return mine.diff(before.plan, after.plan, theirs)

    def score(self, name: str, baseline: str, best: str = PLANNER) -> float:
        """The share, in percent, of the time between two plans that the plan `name` saves.

        0 is as long a step as `baseline`, or no plan that fits; 100 is as short as `best`. A shorter one scores more.

        Raises:
            ValueError: an unknown name; `baseline` or `best` does not fit, or `best` is no shorter than `baseline`.

        >>> from recshard_lab.embedding.configs import EmbeddingBagConfig
        >>> movies = EmbeddingBagConfig(name="movies", num_embeddings=10**6, embedding_dim=64, feature_names=["movie"])
        >>> found = compare_plans([movies], Topology(2), {"slow": "row_wise", "planner": "planner"})
        >>> [round(found.score(name, "slow"), 6) for name in ("planner", "slow")]
        [100.0, 0.0]
        """
        mine, slow, fast = self[name], self[baseline], self[best]
        for which, shown in ((baseline, slow), (best, fast)):
            if not shown.fits:
                raise ValueError(f"the plan {which!r} does not fit, so no score is defined: {shown.problem}")
        whole = _step(slow) - _step(fast)
        if not whole > 0:
            raise ValueError(
                f"the plan {best!r} ({ms_text(_step(fast))}) is no shorter than {baseline!r} ({ms_text(_step(slow))}). "
                f"Fix: exchange them"
            )
        return 100 * (_step(slow) - _step(mine)) / whole if mine.fits else 0.0

    @property
    def searched(self) -> bool:
        """Whether the search of every plan has been recorded."""
        return all(shown.searched for shown in self.answers.values())

    def search(self, is_current: Callable[[], bool] = lambda: True) -> None:
        """Repeats the planning of every plan and records the search, for `views`; 0.2 s for 26 tables.

        Args:
            is_current: called before each plan; returns whether to continue.
        """
        for shown in self.answers.values():
            if not is_current():
                return
            searched(shown, self.tables)

    def views(self, name: str, width: int = 500) -> dict[str, View]:
        """Name of the plan -> a registered view of it, all with the same scale.

        Raises:
            ValueError: an unknown view.
        """
        if name in SEARCHED:
            self.search()
        known = {
            plan: {
                "plan": shown.plan,
                "tables": self.tables,
                "topology": shown.topology,
                "workload": shown.workload,
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
        """Its contents for `lab.export`."""
        from recshard_lab.lab.exporting.exportable import Candidate
        from recshard_lab.lab.exporting.plan_report import comparison_page

        candidates = [
            Candidate(name, a.plan, self.tables, a.topology, a.workload, a.estimate, self.measured.get(name), a.problem)
            for name, a in self.answers.items()
        ]
        return comparison_page(candidates, python=python, name="plan_comparison")

    def records(self) -> list[dict[str, Any]]:
        """One dict per plan."""
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
        """The table: one line per row, one column per plan; the best of each line is marked."""
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
        """The numbers and the reasons of plans that do not fit, as plain text."""
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
    plans: Mapping[str, PlanSpec],
    workload: Workload | None = None,
) -> PlanComparison:
    """Predicts several plans of the same tables for the same ranks and the same step.

    Args:
        tables: the configs.
        topology: the ranks.
        plans: name -> plan. A plan is "planner"; a scheme for all tables; table -> scheme or `ParameterConstraints`,
            with the other tables left to the planner; an `EmbeddingShardingPlanner`, whose constraints, solver, route
            and cost model are used; or a `ShardingPlan`, which is predicted unchanged.
        workload: the step; `Workload()` by default.

    Raises:
        ValueError: no plans, a value of another type, or an unknown table, feature or scheme. A plan that does not fit
            raises nothing: its answer has the reason.

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
    workload.check_names(tables)
    questions = {name: question_of(spec, tables, topology, workload) for name, spec in named(plans).items()}
    return PlanComparison(
        list(tables), {name: answer(question, tables, topology, workload) for name, question in questions.items()}
    )


def named(plans: Mapping[str, PlanSpec]) -> dict[str, PlanSpec]:
    """`plans`, checked to be a mapping of names.

    Raises:
        ValueError: it is another type, or empty.
    """
    if not isinstance(plans, Mapping) or not plans:
        raise ValueError(f"plans must map a name to each plan, as in {{'planned': 'planner'}}, got {plans!r:.80}")
    for name in plans:
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"the name of a plan must be non-empty text, got {name!r:.80}")
    return dict(plans)


def question_of(
    spec: PlanSpec, tables: Sequence[BaseEmbeddingConfig], topology: Topology, workload: Workload
) -> Question:
    """The question for one of the plans of `compare_plans`.

    Raises:
        ValueError: as `compare_plans`.
    """
    base = Question({}, topology.world_size, workload.batch_size, topology.memory_cap_bytes)
    names = [table.name for table in tables]
    if isinstance(spec, ShardingPlan):
        return replace(base, plan=spec)
    if isinstance(spec, EmbeddingShardingPlanner):
        options = {name: getattr(spec, name) for name, usual in _OPTIONS.items() if getattr(spec, name) != usual}
        _check_names(spec.constraints, names)
        return replace(base, constraints=dict(spec.constraints), options=options)
    if isinstance(spec, str):
        return base if spec == PLANNER else replace(base, schemes=dict.fromkeys(names, checked_scheme(spec)))
    if not isinstance(spec, Mapping):
        raise ValueError(
            f"a plan is a ShardingPlan, an EmbeddingShardingPlanner, 'planner', a scheme, or table -> scheme, "
            f"got {spec!r:.80}"
        )
    _check_names(spec, names)
    constraints = {name: value for name, value in spec.items() if isinstance(value, ParameterConstraints)}
    schemes = {name: checked_scheme(value) for name, value in spec.items() if name not in constraints}
    return replace(base, schemes=schemes, constraints=constraints)


def checked_scheme(scheme: Any) -> str:
    """The name of a scheme, or "auto".

    Raises:
        ValueError: an unknown scheme.
    """
    known = ["auto", *scheme_names()]
    name = getattr(scheme, "value", scheme)
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"unknown scheme {name!r:.80}; schemes: {', '.join(known)}")
    return name


def _check_names(given: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in given:
        if name not in names:
            raise ValueError(f"unknown table {name!r:.80}{nearest(str(name), names)}; tables: {', '.join(names)}")


def views_of_plans() -> list[str]:
    """The registered views that need only a plan and its estimate."""
    return views_of(*KNOWN)
