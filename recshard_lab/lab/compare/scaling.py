"""The same tables with other skew, more rows, larger batches, more ranks: what plans, steps and memory become.

A `Setting` is where the sliders stand; `Scaled` is the same as tables, topology and workload, for `compare_plans`.
Nothing is launched: every number is predicted, on a machine by its published figures simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab.compare.plan_comparison import PLANNER
from recshard_lab.lab.compare.question import Answer, Question, topology_for
from recshard_lab.lab.compare.question_code import imported, topology_argument, workload_argument
from recshard_lab.lab.draw.theme import SCHEMES, look_of, ms_text
from recshard_lab.planner import AccessProfile, Workload
from recshard_lab.planner.answers.answers import LEAST_MS
from recshard_lab.sharding import PlanError, Topology, scheme_names
from recshard_lab.sharding.hardware.presets import preset_names

AS_GIVEN, META = "as given", "Meta 2021"
ALPHAS = (0.0, 0.4, 0.6, 0.8, 0.9, 1.0, 1.05, 1.1, 1.2, 1.4, 1.6, 2.0)
FACTORS = (1 / 64, 1 / 16, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 10.0, 40.0, 100.0, 1000.0)
POOLINGS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


@dataclass(frozen=True)
class Setting:
    """Where the sliders stand.

    Args:
        world_size: ranks.
        batch_size: samples of one rank.
        skew: "as given", "Meta 2021", or alpha of ``p(k) ~ k ** -alpha``; 0 is uniform.
        rows_factor: times as many rows in every table.
        pooling_factor: mean ids a bag of every feature; the workload's own when None.
        machine: "as given", or a preset of `Topology.preset`.
        sorted_ids: whether ids are sorted by use, row 0 the most used: then equal numbers of rows are no equal work.
    """

    world_size: int
    batch_size: int
    skew: str | float = AS_GIVEN
    rows_factor: float = 1.0
    pooling_factor: float | None = None
    machine: str = AS_GIVEN
    sorted_ids: bool = False


def skews() -> list[tuple[str, str | float]]:
    """The steps of the skew's slider.

    >>> skews()[1], skews()[-1]
    (('uniform', 0.0), ('Meta 2021', 'Meta 2021'))
    """
    return [(AS_GIVEN, AS_GIVEN), *((f"Zipf {a:g}" if a else "uniform", a) for a in ALPHAS), (META, META)]


def factors() -> list[tuple[str, float]]:
    """The steps of the rows' slider.

    >>> factors()[0][0], factors()[-1][0]
    ('1/64', '1,000')
    """
    return [(f"1/{round(1 / factor)}" if factor < 1 else f"{factor:,.0f}", factor) for factor in FACTORS]


def poolings() -> list[tuple[str, float | None]]:
    """The steps of the pooling factor's slider."""
    return [(AS_GIVEN, None), *((f"{factor:g}", factor) for factor in POOLINGS)]


def machines() -> list[str]:
    """Whose figures there are: the topology's own, and those of machines by name."""
    return [AS_GIVEN, *(name for name in preset_names() if name != "this")]


@dataclass(frozen=True)
class Scaled:
    """A setting applied: what `compare_plans` takes."""

    tables: tuple[BaseEmbeddingConfig, ...]
    topology: Topology
    workload: Workload

    @classmethod
    def by(
        cls, setting: Setting, tables: Sequence[BaseEmbeddingConfig], topology: Topology, workload: Workload
    ) -> Scaled:
        """`tables`, `topology` and `workload` as the setting has them.

        >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=1000, embedding_dim=16)
        >>> made = Scaled.by(Setting(64, 512, 1.05, 4.0, machine="h100"), [movies], Topology(2), Workload())
        >>> made.tables[0].num_embeddings, made.topology.num_nodes, made.workload.zipf_alpha
        (4000, 8, 1.05)
        """
        grown = tuple(
            replace(table, num_embeddings=max(1, round(setting.rows_factor * table.num_embeddings))) for table in tables
        )
        load = replace(workload, batch_size=setting.batch_size)
        if setting.skew == META:
            load = replace(load, access="meta_2021", zipf_alpha=0.0, unique_fraction=None)
        elif setting.skew != AS_GIVEN:
            load = replace(load, access=None, zipf_alpha=float(setting.skew), unique_fraction=None)
        if setting.pooling_factor is not None:
            load = replace(load, pooling_factors=setting.pooling_factor)
        if setting.sorted_ids:
            load = replace(load, frequency_ordered=True)
        if setting.machine != AS_GIVEN:
            return cls(grown, Topology.preset(setting.machine, **ranks_of(setting)), load)
        asked = Question({}, setting.world_size, setting.batch_size, topology.memory_cap_bytes)
        return cls(grown, topology_for(asked, topology), load)

    def shares(self, table: str) -> AccessProfile:
        """How often the rows of a table are used, from the most used on, for `views.access_skew`."""
        config = next(each for each in self.tables if each.name == table)
        curve = self.workload.row_shares(config)
        if curve is None:
            return AccessProfile(uses=(1.0,), rows=(float(config.num_embeddings),), source="uniform")
        wide, held = np.diff(curve.edges), np.diff(curve.shares)
        uses, place = np.unique(np.round(held / wide * config.num_embeddings, 12), return_inverse=True)
        rows = np.bincount(place, weights=wide)
        used = uses > 0
        return AccessProfile(tuple(uses[used].tolist()), tuple(rows[used].tolist()), source="the workload's curve")


def ranks_of(setting: Setting) -> dict[str, int]:
    """``world_size`` for a machine by name; ranks that do not fill its hosts are in the largest hosts that they fill.

    >>> ranks_of(Setting(16, 1, machine="h100")), ranks_of(Setting(12, 1, machine="h100"))
    ({'world_size': 16}, {'world_size': 12, 'local_world_size': 6})
    """
    ranks = {"world_size": setting.world_size}
    try:
        Topology.preset(setting.machine, **ranks)
    except ValueError:
        local = min(Topology.preset(setting.machine).local_world_size, setting.world_size)
        while setting.world_size % local:
            local -= 1
        return {**ranks, "local_world_size": local}
    return ranks


def columns() -> dict[str, str]:
    """The plans that a setting is judged by: the planner's, and all tables under each scheme."""
    return {PLANNER: PLANNER, **{scheme: scheme for scheme in scheme_names()}}


def python_for_setting(setting: Setting, topology: Topology, workload: Workload) -> str:
    """A setting in Python; ``tables`` are the reader's configs, ``access`` the workload's, where it has one."""
    made = Scaled.by(setting, [], topology, workload)
    lines = []
    grown = "tables"
    if setting.rows_factor != 1:
        times = f"round({setting.rows_factor!r} * table.num_embeddings)"
        lines += [f"grown = [replace(table, num_embeddings=max(1, {times})) for table in tables]"]
        grown = "grown"
    if setting.machine == AS_GIVEN:
        asked = Question({}, setting.world_size, setting.batch_size, topology.memory_cap_bytes)
        step = topology_argument(asked, topology)
    else:
        figures = ", ".join(f"{name}={value}" for name, value in ranks_of(setting).items())
        step = [f'    topology=Topology.preset("{setting.machine}", {figures}),']
    step += workload_argument(made.workload, '"meta_2021"' if setting.skew == META else "access")
    plans = f'plans = {{"{PLANNER}": "{PLANNER}", **{{name: name for name in scheme_names()}}}}'
    lines += [plans, "found = compare_plans("]
    lines += [f"    {grown},", "    plans=plans,", *step, ")", "print(found)"]
    code = imported("\n".join(lines), ["Topology", "Workload", "compare_plans"])
    code = code.replace("\n\n", "\nfrom recshard_lab.sharding import scheme_names\n\n", 1)
    return code if grown == "tables" else f"from dataclasses import replace\n\n{code}"


@dataclass(frozen=True)
class Choice:
    """A table whose scheme the planner changes from one setting to another.

    Attributes:
        table: its name.
        before, after: its scheme.
        why: what the scheme it had would cost now, in words.
        more_ms: the same in ms; None where it is not possible, or not computed yet.
    """

    table: str
    before: str
    after: str
    why: str = ""
    more_ms: float | None = None


def choices_changed(before: Answer, after: Answer) -> list[Choice]:
    """The tables that the planner puts under another scheme, without the reasons."""
    if before.plan is None or after.plan is None:
        return []
    old, new = before.plan.tables(), after.plan.tables()
    return [
        Choice(name, str(old[name].sharding_type), str(new[name].sharding_type))
        for name in new
        if name in old and old[name].sharding_type != new[name].sharding_type
    ]


def with_reasons(choices: Sequence[Choice], after: Answer, wanted: Callable[[], bool] = lambda: True) -> list[Choice]:
    """The same with what the scheme that each table had would cost now, all other tables where they are.

    Args:
        wanted: asked before each; what is left then goes without.
    """
    found = []
    for choice in choices:
        if not wanted() or after.plan is None or after.plan.planned is None:
            found.append(choice)
            continue
        label = look_of(choice.before, SCHEMES).label
        try:
            ways: list[Any] = [
                way
                for way in after.plan.explain(choice.table).alternatives
                if way.sharding.sharding_type == choice.before
            ]
        except PlanError as error:
            found.append(replace(choice, why=str(error)))
            continue
        if not ways:
            found.append(replace(choice, why=f"{label} would cut it just as it lies now"))
            continue
        best = min(ways, key=lambda way: (not way.fits, way.more_ms))
        why = f"{label} would cost {ms_text(best.more_ms)} more a step"
        if not best.fits:
            why = f"{label} does not fit any more"
        elif abs(best.more_ms) <= LEAST_MS:
            why = f"{label} would take as long"
        elif best.more_ms < 0:
            why = f"{label} would save {ms_text(-best.more_ms)}: the search stops near the best"
        found.append(replace(choice, why=why, more_ms=best.more_ms))
    return found
