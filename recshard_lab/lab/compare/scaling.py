"""The same tables with other skew, more rows, larger batches or more ranks: effects on plans, steps and memory.

A `Setting` has the positions of the sliders; `Scaled` has tables, topology and workload for `compare_plans`. No ranks
are launched: every number is predicted, and for a machine by name it is simulated from published figures.
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

UNCHANGED, META = "unchanged", "Meta 2021"
ALPHAS = (0.0, 0.4, 0.6, 0.8, 0.9, 1.0, 1.05, 1.1, 1.2, 1.4, 1.6, 2.0)
FACTORS = (1 / 64, 1 / 16, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 10.0, 40.0, 100.0, 1000.0)
POOLINGS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


@dataclass(frozen=True)
class Setting:
    """The positions of the sliders.

    Args:
        world_size: number of ranks.
        batch_size: samples per rank.
        skew: "unchanged", "Meta 2021", or alpha of ``p(k) ~ k ** -alpha``; 0 is uniform.
        rows_factor: factor on the rows of every table.
        pooling_factor: mean ids per bag of every feature; None keeps that of the workload.
        machine: "unchanged", or a preset of `Topology.preset`.
        sorted_ids: whether ids are sorted by use, with row 0 used most. Equal row shards are then unequal work.
    """

    world_size: int
    batch_size: int
    skew: str | float = UNCHANGED
    rows_factor: float = 1.0
    pooling_factor: float | None = None
    machine: str = UNCHANGED
    sorted_ids: bool = False


def skews() -> list[tuple[str, str | float]]:
    """The steps of the slider of the skew.

    >>> skews()[1], skews()[-1]
    (('uniform', 0.0), ('Meta 2021', 'Meta 2021'))
    """
    return [(UNCHANGED, UNCHANGED), *((f"Zipf {a:g}" if a else "uniform", a) for a in ALPHAS), (META, META)]


def factors() -> list[tuple[str, float]]:
    """The steps of the rows' slider.

    >>> factors()[0][0], factors()[-1][0]
    ('1/64', '1,000')
    """
    return [(f"1/{round(1 / factor)}" if factor < 1 else f"{factor:,.0f}", factor) for factor in FACTORS]


def poolings() -> list[tuple[str, float | None]]:
    """The steps of the pooling factor's slider."""
    return [(UNCHANGED, None), *((f"{factor:g}", factor) for factor in POOLINGS)]


def machines() -> list[str]:
    """The known machines: the topology's own figures, and machines by name."""
    return [UNCHANGED, *(name for name in preset_names() if name != "this")]


@dataclass(frozen=True)
class Scaled:
    """Tables, topology and workload of a setting, for `compare_plans`."""

    tables: tuple[BaseEmbeddingConfig, ...]
    topology: Topology
    workload: Workload

    @classmethod
    def by(
        cls, setting: Setting, tables: Sequence[BaseEmbeddingConfig], topology: Topology, workload: Workload
    ) -> Scaled:
        """`tables`, `topology` and `workload`, changed by the setting.

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
        elif setting.skew != UNCHANGED:
            load = replace(load, access=None, zipf_alpha=float(setting.skew), unique_fraction=None)
        if setting.pooling_factor is not None:
            load = replace(load, pooling_factors=setting.pooling_factor)
        if setting.sorted_ids:
            load = replace(load, frequency_ordered=True)
        if setting.machine != UNCHANGED:
            return cls(grown, Topology.preset(setting.machine, **ranks_of(setting)), load)
        asked = Question({}, setting.world_size, setting.batch_size, topology.memory_cap_bytes)
        return cls(grown, topology_for(asked, topology), load)

    def shares(self, table: str) -> AccessProfile:
        """How often the rows of a table are used, most used first, for `views.access_skew`."""
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
    """Arguments of `Topology.preset`. Ranks that do not fill the hosts get the largest hosts that they fill.

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
    """The plans of a setting: the planner's, and all tables under each scheme."""
    return {PLANNER: PLANNER, **{scheme: scheme for scheme in scheme_names()}}


def python_for_setting(setting: Setting, topology: Topology, workload: Workload) -> str:
    """A setting in Python with the variables ``tables``, and ``access`` for profiles of the workload."""
    made = Scaled.by(setting, [], topology, workload)
    lines = []
    grown = "tables"
    if setting.rows_factor != 1:
        times = f"round({setting.rows_factor!r} * table.num_embeddings)"
        lines += [f"grown = [replace(table, num_embeddings=max(1, {times})) for table in tables]"]
        grown = "grown"
    if setting.machine == UNCHANGED:
        asked = Question({}, setting.world_size, setting.batch_size, topology.memory_cap_bytes)
        step = topology_argument(asked, topology)
    else:
        figures = ", ".join(f"{name}={value}" for name, value in ranks_of(setting).items())
        step = [f'    topology=Topology.preset("{setting.machine}", {figures}),']
    step += workload_argument(made.workload, '"meta_2021"' if setting.skew == META else "access")
    plans = f'plans = {{"{PLANNER}": "{PLANNER}", **{{name: name for name in rs.sharding.scheme_names()}}}}'
    lines += [plans, "found = compare_plans("]
    lines += [f"    {grown},", "    plans=plans,", *step, ")", "print(found)"]
    code = imported("\n".join(lines))
    return code if grown == "tables" else f"from dataclasses import replace\n\n{code}"


@dataclass(frozen=True)
class Choice:
    """A table whose scheme the planner changes from one setting to another.

    Attributes:
        table: its name.
        before, after: its scheme.
        why: the effect of the old scheme now, in words.
        more_ms: the same in ms; None if it is not possible or not computed yet.
    """

    table: str
    before: str
    after: str
    why: str = ""
    more_ms: float | None = None


def choices_changed(before: Answer, after: Answer) -> list[Choice]:
    """The tables for which the planner chooses another scheme, without the reasons."""
    if before.plan is None or after.plan is None:
        return []
    old, new = before.plan.tables(), after.plan.tables()
    return [
        Choice(name, str(old[name].sharding_type), str(new[name].sharding_type))
        for name in new
        if name in old and old[name].sharding_type != new[name].sharding_type
    ]


def with_reasons(
    choices: Sequence[Choice], after: Answer, is_current: Callable[[], bool] = lambda: True
) -> list[Choice]:
    """The same with the effect of the old scheme of each table now, with all other tables unchanged.

    Args:
        is_current: called before each table; once it returns False, the rest gets no reason.
    """
    found = []
    for choice in choices:
        if not is_current() or after.plan is None or after.plan.planned is None:
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
            found.append(replace(choice, why=f"{label} would make the same shards"))
            continue
        best = min(ways, key=lambda way: (not way.fits, way.more_ms))
        why = f"{label} would cost {ms_text(best.more_ms)} more per step"
        if not best.fits:
            why = f"{label} no longer fits"
        elif abs(best.more_ms) <= LEAST_MS:
            why = f"{label} would take as long"
        elif best.more_ms < 0:
            why = f"{label} would save {ms_text(-best.more_ms)}: the search is not exhaustive"
        found.append(replace(choice, why=why, more_ms=best.more_ms))
    return found
