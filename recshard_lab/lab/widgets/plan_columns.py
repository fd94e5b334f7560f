"""The plans of a comparison: a `Column` is one plan, a `ColumnBar` has the controls that change them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ipywidgets as ipw

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab.compare.plan_comparison import PlanSpec, checked_scheme, named, question_of
from recshard_lab.lab.compare.question import AUTO, Question, facts_of
from recshard_lab.lab.compare.question_code import imported, spec_code, step_arguments
from recshard_lab.lab.draw.theme import SCHEMES, look_of
from recshard_lab.lab.widgets import controls, page
from recshard_lab.lab.widgets.base import Quiet
from recshard_lab.lab.widgets.components import FileButton
from recshard_lab.planner import Workload
from recshard_lab.planner.answers.text import ranks_word
from recshard_lab.sharding import ParameterConstraints, ShardingPlan, Topology, scheme_names

FEWEST, MOST = 2, 6
MOST_MENUS = 48  # tables with separate menus; the smaller ones share one
HAND, PLANNED, TORCHREC, GIVEN = "hand", "planner", "torchrec", "given"
KINDS = {
    HAND: "by hand",
    PLANNED: "by the planner",
    TORCHREC: "by the planner, with TorchRec's formulas",
    GIVEN: "in advance, fixed",
}
KINDS_UNDER_CONSTRAINTS = {
    HAND: "by constraints and by hand",
    PLANNED: "by the planner, under constraints",
    TORCHREC: "by TorchRec's formulas, under constraints",
}
AS_GIVEN, MIXED = "as given", "mixed"  # of a menu: the table's constraint stands; its tables have several schemes
FIRST_NAMES = {"mine": "Your plan", "auto": "The planner's plan"}


@dataclass
class Column:
    """One plan of the comparison, for any number of ranks, batch size and memory.

    Args:
        key: identifies it, also after it is renamed.
        name: as shown.
        kind: how it is chosen, one of `KINDS`.
        start: the question that it was made from; its ranks, batch and memory are not used.
        schemes: table -> scheme or "auto", for a plan by hand. They replace the constraints of `start`; a table that is
            missing keeps its constraint, or is "auto".
        allowed: schemes that the planner may use; all if empty.
    """

    key: str
    name: str
    kind: str
    start: Question
    schemes: dict[str, str] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()

    def question(self, world_size: int, batch_size: int, memory_cap: int) -> Question:
        """The question for these ranks, this batch and this memory."""
        base = Question({}, world_size, batch_size, memory_cap)
        if self.kind == GIVEN:
            return replace(base, plan=self.start.plan)
        options = {name: value for name, value in self.start.options.items() if name != "cost_model"}
        if self.kind == TORCHREC:
            options["cost_model"] = "torchrec"
        given = self.start.constraints
        if self.kind != HAND:
            return replace(base, constraints=given, options=options, allowed=self.allowed)
        loose = {name: facts_of(given[name]) for name in self.schemes if name in given}
        constraints = {name: value for name, value in {**given, **loose}.items() if value != ParameterConstraints()}
        return replace(base, schemes=dict(self.schemes), constraints=constraints, options=options)

    def scheme(self, table: str) -> str:
        """What the table's menu shows: a scheme, "auto" or `AS_GIVEN`."""
        return self.schemes.get(table, AS_GIVEN if table in self.start.constraints else AUTO)

    def copied(self, key: str, name: str, plan: ShardingPlan | None) -> Column:
        """A copy. The copy of a fixed plan is a plan by hand with the same schemes."""
        copy = replace(self, key=key, name=name, schemes=dict(self.schemes))
        if self.kind == GIVEN:
            copy.kind, copy.start = HAND, replace(self.start, plan=None)
            copy.schemes = {} if plan is None else schemes_of(plan)
        return copy


def given_label(constraint: ParameterConstraints) -> str:
    """The scheme that a table's constraint gives it.

    >>> given_label(ParameterConstraints(["table_wise"], ranks=[3])), given_label(ParameterConstraints(ranks=[3]))
    ('table-wise, rank 3', 'auto, rank 3')
    """
    if constraint.shards is not None:
        return "these shards"
    schemes = constraint.sharding_types or []
    label = look_of(schemes[0], SCHEMES).label if len(schemes) == 1 else f"{len(schemes)} schemes" if schemes else AUTO
    return f"{label}, {ranks_word(constraint.ranks)}" if constraint.ranks else f"{label}, as given"


def schemes_of(plan: ShardingPlan) -> dict[str, str]:
    """Table -> scheme; "auto" for a sharding type that is not registered."""
    known = scheme_names()
    found = {name: str(sharding.sharding_type) for name, sharding in plan.tables().items()}
    return {name: scheme if scheme in known else AUTO for name, scheme in found.items()}


def first_columns(
    tables: Sequence[BaseEmbeddingConfig],
    topology: Topology,
    workload: Workload,
    plans: Mapping[str, PlanSpec] | None,
    schemes: Mapping[str, str] | None,
) -> dict[str, Column]:
    """Key -> column at the beginning: `plans`, or a plan by hand beside the planner's.

    Raises:
        ValueError: as `compare_plans`; fewer plans than 2 or more than 6; schemes together with plans.
    """
    if plans is None:
        start = question_of(PLANNED, tables, topology, workload)
        mine = Column("mine", FIRST_NAMES["mine"], HAND, start, dict(schemes or {}))
        return {"mine": mine, "auto": Column("auto", FIRST_NAMES["auto"], PLANNED, start)}
    specs = named(plans)
    if not FEWEST <= len(specs) <= MOST:
        raise ValueError(f"a comparison shows {FEWEST} to {MOST} plans, got {len(specs)}: {', '.join(specs)}")
    if schemes:
        raise ValueError("schemes belong to 'Your plan', which plans= replaces. Fix: plans={'my plan': {...}, ...}")
    return {name: column_of(name, spec, tables, topology, workload) for name, spec in specs.items()}


def column_of(
    name: str, spec: PlanSpec, tables: Sequence[BaseEmbeddingConfig], topology: Topology, workload: Workload
) -> Column:
    """The column of a plan as `compare_plans` takes it.

    Raises:
        ValueError: as `compare_plans`.
    """
    question = question_of(spec, tables, topology, workload)
    kind = GIVEN if question.plan is not None else HAND if question.chosen or question.constraints else PLANNED
    if question.options.get("cost_model") == "torchrec":
        kind = TORCHREC
    return Column(name, name, kind, replace(question, schemes={}), dict(question.schemes))


def python_of_all(
    columns: Sequence[Column],
    step: tuple[int, int, int],
    topology: Topology,
    workload: Workload,
    num_tables: int,
    last: str = "",
) -> str:
    """The whole comparison in Python.

    Args:
        step: ranks, batch and memory of one rank.
        last: another line, in which the comparison is the variable ``found``.
    """
    lines = ["found = compare_plans(", "    tables,"]
    plans = ["    plans={"]
    for column in columns:
        first, *rest = spec_code(column.question(*step), num_tables)
        plans += [f"        {column.name!r}: {first}", *(f"        {line}" for line in rest)]
        plans[-1] += ","
    lines += [*step_arguments(Question({}, *step), topology, workload), *plans, "    },", ")", "print(found)", last]
    return imported("\n".join(lines).rstrip())


class ColumnBar(Quiet, ipw.VBox):
    """Controls that choose, rename, add, remove, load and change columns.

    Args:
        columns: key -> column; changed in place.
        tables: the configs.
        changed: called after every change by the reader.
        plan_of: key -> the plan shown in that column, or None.
        fail: shows an error.
    """

    def __init__(
        self,
        columns: dict[str, Column],
        tables: Sequence[BaseEmbeddingConfig],
        changed: Callable[[], None],
        plan_of: Callable[[str], ShardingPlan | None],
        fail: Callable[[str | Exception], None],
    ) -> None:
        self.columns, self.tables = columns, list(tables)
        self._changed, self._plan_of, self._fail = changed, plan_of, fail
        self._count = len(columns)
        self._build_menus()
        self._build_controls()
        first = controls.row([self.picker, self.title, self.kind, self.add, self.remove, self.load])
        super().__init__([first, self._hand, self._planner], layout=ipw.Layout(width="100%"))
        self.show()

    # ---- building ----

    def _build_menus(self) -> None:
        largest = sorted(self.tables, key=lambda table: -table.weight_bytes)[:MOST_MENUS]
        self.menus = {t.name: controls.menu(t.name, page.facts(t)) for t in self.tables if t in largest}
        self.sharing = [table.name for table in self.tables if table.name not in self.menus]
        self.others = controls.menu(f"{len(self.sharing)} others", "the smaller tables") if self.sharing else None
        options = [("choose", ""), *controls.scheme_options()]
        self.set_all = controls.pick("Set all to", "sets the scheme of every table of this plan", options, "200px")
        for menu, names in self.all_menus():
            self.on(menu, partial(self._menu_moved, names))
        self.on(self.set_all, self._all_moved)
        heading = controls.row([ipw.HTML("<b>Scheme of each table</b>"), self.set_all])
        self._menu_grid = controls.grid([menu for menu, _ in self.all_menus()])
        self._hand = controls.column([heading, self._menu_grid])
        self.allowed = {
            name: controls.tick(look_of(name, SCHEMES).label, f"whether the planner may choose {name}")
            for name in scheme_names()
        }
        for box in self.allowed.values():
            self.on(box, lambda _: self._edit(self._read_allowed))
        hint = "shows which schemes the planner may choose"
        self.folded = ipw.ToggleButton(value=False, icon="caret-right", tooltip=hint, layout=ipw.Layout(width="auto"))
        self._ticks = controls.row(list(self.allowed.values()))
        self.folded.observe(lambda _: self._show_allowed(), names="value")
        self._planner = controls.column([self.folded, self._ticks])

    def _build_controls(self) -> None:
        self.picker = controls.pick("Plan", "the plan that the controls below change", [("", "")], "210px")
        self.title = controls.words("Name", "name of this plan", "190px")
        self.kind = controls.pick("Chosen", "how the placement of this plan is chosen", [("", "")], "270px")
        self.add = controls.button("Add a plan", "adds a copy of this plan, up to 6 plans", "plus")
        self.remove = controls.button("Remove", "removes this plan, down to 2 plans", "minus")
        self.load = FileButton("Plan from JSON", "adds a plan from a file that plan.to_json() wrote", ".json")
        self.on(self.picker, lambda _: self._edit(self.show))
        self.on(self.title, lambda name: self._edit(lambda: self._rename(name.strip())))
        self.on(self.kind, lambda kind: self._edit(lambda: self._set_kind(kind)))
        self.add.on_click(lambda _: self._guard(self.add_copy))
        self.remove.on_click(lambda _: self._guard(self.remove_column))
        self.load.on_file(lambda name, text: self._guard(lambda: self._load(name, text)))

    def all_menus(self) -> list[tuple[ipw.Dropdown, list[str]]]:
        """Every menu and its tables."""
        shared = [] if self.others is None else [(self.others, self.sharing)]
        return [*((menu, [name]) for name, menu in self.menus.items()), *shared]

    # ---- changes from Python, through the comparison ----

    @property
    def chosen(self) -> Column:
        """The column that the controls change."""
        return self.columns[self.picker.value]

    def choose(self, key: str) -> None:
        """Lets the controls change another column.

        Raises:
            ValueError: an unknown key.
        """
        self._check(key)
        with self.quietly():
            self.picker.value = key
        self.show()

    def add_copy(self) -> str:
        """Adds a copy of the chosen column, chooses it and returns its key.

        Raises:
            ValueError: there are 6 already.
        """
        key = self._new_key()
        return self.put(self.chosen.copied(key, key, self._plan_of(self.chosen.key)))

    def put(self, column: Column) -> str:
        """Adds a column, chooses it and returns its key.

        Raises:
            ValueError: there are 6 already, or one of this name.
        """
        if len(self.columns) >= MOST:
            raise ValueError(f"a comparison shows at most {MOST} plans. Fix: remove one")
        if column.key in self.columns or column.name in self._names():
            raise ValueError(f"a plan named {column.name!r} exists already. Fix: choose another name")
        self.columns[column.key] = column
        self._after(column.key)
        return column.key

    def remove_column(self, key: str = "") -> None:
        """Removes a column, by default the chosen one.

        Raises:
            ValueError: an unknown key, or only 2 are left.
        """
        key = key or self.chosen.key
        self._check(key)
        if len(self.columns) <= FEWEST:
            raise ValueError(f"a comparison needs at least {FEWEST} plans")
        del self.columns[key]
        self._after(self.picker.value if self.picker.value in self.columns else next(iter(self.columns)))

    def set_scheme(self, table: str, scheme: str) -> None:
        """Sets a table's scheme in the chosen column, which becomes a plan by hand. Its constraint no longer holds.

        Raises:
            ValueError: an unknown table or scheme, or a table that shares a menu.
        """
        if table in self.sharing:
            raise ValueError(
                f"table {table!r} shares one menu with {len(self.sharing)} small tables. Fix: set .others.value"
            )
        if table not in self.menus:
            raise ValueError(f"unknown table {table!r}; tables: {', '.join(self.menus)}")
        self._set_by_hand()
        self.chosen.schemes[table] = checked_scheme(scheme)

    def _check(self, key: str) -> None:
        if key not in self.columns:
            raise ValueError(f"unknown plan {key!r}; plans: {', '.join(self.columns)}")

    # ---- showing ----

    def show(self) -> None:
        """Sets the controls to the chosen column."""
        with self.quietly():
            entries = [(column.name, key) for key, column in self.columns.items()]
            now = self.picker.value if self.picker.value in self.columns else entries[0][1]
            _offer(self.picker, entries, now)
            column = self.chosen
            self.title.value = column.name
            labels = {**KINDS, **KINDS_UNDER_CONSTRAINTS} if column.start.constraints else KINDS
            kinds = [(label, kind) for kind, label in labels.items() if kind != GIVEN or column.start.plan is not None]
            _offer(self.kind, kinds, column.kind)
            self._show_menus()
            for name, box in self.allowed.items():
                box.value = not column.allowed or name in column.allowed
        self._show_allowed()
        self._hand.layout.display = "" if column.kind == HAND else "none"
        self._planner.layout.display = "none" if column.kind in (HAND, GIVEN) else ""
        self.add.disabled = self.load.disabled = len(self.columns) >= MOST
        self.remove.disabled = len(self.columns) <= FEWEST

    def _show_menus(self) -> None:
        """The scheme of every table in the chosen column. A table with a constraint has one more entry."""
        column = self.chosen
        width = controls.LONG_MENU_WIDTH if column.start.constraints else controls.MENU_WIDTH
        self._menu_grid.layout.grid_template_columns = controls.template_of(width, "fill")
        for menu, names in self.all_menus():
            given = [column.start.constraints[name] for name in names if name in column.start.constraints]
            found = {column.scheme(name) for name in names}
            options = [*controls.scheme_options()]
            if given:
                label = given_label(given[0]) if len(names) == 1 else AS_GIVEN
                options.insert(0, (label, AS_GIVEN))
            if len(found) > 1:
                options.insert(0, ("several schemes", MIXED))
            _offer(menu, options, found.pop() if len(found) == 1 else MIXED)

    def _show_allowed(self) -> None:
        """The fold of the planner's schemes, and their number."""
        used = sum(box.value for box in self.allowed.values())
        which = "all schemes" if used == len(self.allowed) else f"{used} of {len(self.allowed)} schemes"
        self.folded.description = f"The planner may use {which}"
        self.folded.icon = "caret-down" if self.folded.value else "caret-right"
        self._ticks.layout.display = "" if self.folded.value else "none"

    # ---- changes by the reader ----

    def _edit(self, change: Callable[[], Any]) -> None:
        """Makes a change, or shows why it is not possible and resets the controls."""
        try:
            change()
        except ValueError as error:
            self.show()
            self._fail(str(error))
            return
        self._changed()

    def _guard(self, change: Callable[[], Any]) -> None:
        """Makes a change that calls `changed` itself, or shows why it is not possible."""
        try:
            change()
        except ValueError as error:
            self._fail(str(error))

    def _menu_moved(self, names: Sequence[str], scheme: str) -> None:
        self._edit(lambda: self._set_schemes(names, scheme))

    def _set_schemes(self, names: Sequence[str], scheme: str) -> None:
        column = self.chosen
        if scheme == AS_GIVEN:
            column.schemes = {name: value for name, value in column.schemes.items() if name not in names}
        elif scheme != MIXED:
            column.schemes = {**column.schemes, **dict.fromkeys(names, scheme)}
        with self.quietly():
            self._show_menus()

    def _all_moved(self, scheme: str) -> None:
        if not scheme:
            return
        with self.quietly():
            self.set_all.value = ""
        self._edit(lambda: self._set_schemes([table.name for table in self.tables], scheme))

    def _read_allowed(self) -> None:
        ticked = tuple(name for name, box in self.allowed.items() if box.value)
        if not ticked:
            raise ValueError("the planner needs at least one scheme. Fix: leave one ticked")
        self.chosen.allowed = () if len(ticked) == len(self.allowed) else ticked
        self._show_allowed()

    def _set_kind(self, kind: str) -> None:
        if kind == HAND:
            self._set_by_hand()
        else:
            self.chosen.kind = kind
        self.show()

    def _set_by_hand(self) -> None:
        """A fixed plan begins with its schemes when it becomes a plan by hand."""
        column = self.chosen
        plan = self._plan_of(column.key)
        if column.kind == GIVEN and not column.schemes and plan is not None:
            column.schemes = schemes_of(plan)
        column.kind = HAND

    def _rename(self, name: str) -> None:
        if name != self.chosen.name:
            if not name:
                raise ValueError("a plan needs a name")
            if name in self._names():
                raise ValueError(f"a plan named {name!r} exists already. Fix: choose another name")
            self.chosen.name = name
        self.show()

    def _load(self, file: str, text: str) -> None:
        plan = ShardingPlan.from_json(text)
        name = file.removesuffix(".json") or "from JSON"
        name = name if name not in self._names() else self._new_key()
        start = next(iter(self.columns.values())).start
        self.put(Column(name, name, GIVEN, replace(start, plan=plan, constraints={}, options={})))

    def _names(self) -> list[str]:
        return [column.name for column in self.columns.values()]

    def _after(self, key: str) -> None:
        with self.quietly():
            self.picker.options = [(column.name, each) for each, column in self.columns.items()]
            self.picker.value = key
        self.show()
        self._changed()

    def _new_key(self) -> str:
        while True:
            self._count += 1
            if f"Plan {self._count}" not in {*self.columns, *self._names()}:
                return f"Plan {self._count}"


def _offer(menu: ipw.Dropdown, options: list[tuple[str, str]], value: str) -> None:
    """Options and value of a menu; equal options are not sent again."""
    if list(menu.options) != options:
        menu.options = options
    menu.value = value
