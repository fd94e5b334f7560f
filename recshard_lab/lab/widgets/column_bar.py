"""The controls of the columns: which one is edited, who makes its plan, its schemes; add, remove, load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ipywidgets as ipw

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab.compare.plan_comparison import checked_scheme
from recshard_lab.lab.compare.question import AUTO
from recshard_lab.lab.draw.theme import SCHEMES, look_of
from recshard_lab.lab.widgets import controls, page
from recshard_lab.lab.widgets.file_button import FileButton
from recshard_lab.lab.widgets.plan_columns import FEWEST, GIVEN, HAND, KINDS, MOST, Column, schemes_of
from recshard_lab.sharding import ShardingPlan, scheme_names

MOST_MENUS = 48  # tables with a menu of their own; the smaller ones share one


class ColumnBar(ipw.VBox):
    """Edits columns.

    Args:
        columns: key -> column; changed in place.
        tables: the configs.
        changed: called after every change by the reader.
        plan_of: key -> the plan that is shown there, None where there is none.
        tell: shows a sentence that something went wrong.
    """

    def __init__(
        self,
        columns: dict[str, Column],
        tables: Sequence[BaseEmbeddingConfig],
        changed: Callable[[], None],
        plan_of: Callable[[str], ShardingPlan | None],
        tell: Callable[[str], None],
    ) -> None:
        self.columns, self.tables = columns, list(tables)
        self._changed, self._plan_of, self._tell = changed, plan_of, tell
        self._quiet = False
        self._made = len(columns)
        self._build_menus()
        self._build_controls()
        super().__init__(
            [
                controls.row([self.picker, self.title, self.kind, self.add, self.remove, self.load]),
                self._hand,
                self._planner,
            ],
            layout=ipw.Layout(width="100%"),
        )
        self.show()

    # ---- building ----

    def _build_menus(self) -> None:
        own = sorted(self.tables, key=lambda table: -table.weight_bytes)[:MOST_MENUS]
        self.menus = {table.name: controls.menu(table.name, page.facts(table)) for table in self.tables if table in own}
        self.sharing = [table.name for table in self.tables if table.name not in self.menus]
        self.others = controls.menu(f"{len(self.sharing)} others", "the smaller tables") if self.sharing else None
        self.set_all = controls.set_all()
        for menu in self.all_menus():
            menu.observe(self._menu_moved, names="value")
        self.set_all.observe(self._all_moved, names="value")
        heading = controls.row([ipw.HTML("<b>Scheme of each table</b>"), self.set_all])
        self._hand = ipw.VBox([heading, controls.grid(self.all_menus())], layout=ipw.Layout(width="100%"))
        self.allowed = {name: controls.tick(look_of(name, SCHEMES).label, name) for name in scheme_names()}
        for box in self.allowed.values():
            box.observe(self._allowed_moved, names="value")
        hint = "shows which schemes the planner may choose"
        self.folded = ipw.ToggleButton(value=False, icon="caret-right", tooltip=hint, layout=ipw.Layout(width="auto"))
        self._ticks = controls.row(list(self.allowed.values()))
        self.folded.observe(lambda _: self._show_allowed(), names="value")
        self._planner = ipw.VBox([self.folded, self._ticks], layout=ipw.Layout(width="100%"))

    def _build_controls(self) -> None:
        self.picker = controls.pick("Plan", "which plan the controls below change", [("", "")], "210px")
        self.title = controls.words("Name", "what this plan is called", "190px")
        self.kind = controls.pick("Chosen", "who chooses where the tables of this plan are placed", [("", "")], "270px")
        self.add = controls.button("Add a plan", "adds a plan that begins as a copy of this one, at most 6", "plus")
        self.remove = controls.button("Remove", "takes this plan out of the comparison, which keeps 2", "minus")
        self.load = FileButton("Plan from JSON", "adds a plan from a file that plan.to_json() wrote", ".json")
        self.picker.observe(lambda _: self._moved(self.show), names="value")
        self.title.observe(self._renamed, names="value")
        self.kind.observe(self._kind_moved, names="value")
        self.add.on_click(lambda _: self._told(self.add_copy))
        self.remove.on_click(lambda _: self._told(self.remove_column))
        self.load.on_file(lambda name, text: self._told(lambda: self._loaded(name, text)))

    def all_menus(self) -> list[ipw.Dropdown]:
        return [*self.menus.values(), *([self.others] if self.others is not None else [])]

    # ---- what a reader asks from Python, by way of the comparison ----

    @property
    def chosen(self) -> Column:
        """The column that the controls change."""
        return self.columns[self.picker.value]

    def choose(self, key: str) -> None:
        """Lets the controls change another column.

        Raises:
            ValueError: there is none of this key.
        """
        if key not in self.columns:
            raise ValueError(f"there is no plan {key!r}; plans: {', '.join(self.columns)}")
        with self.quietly():
            self.picker.value = key
        self.show()

    def add_copy(self) -> str:
        """Adds a copy of the chosen column and chooses it; its key.

        Raises:
            ValueError: there are 6 already.
        """
        key = self._new_key()
        return self.put(self.chosen.copied(key, key, self._plan_of(self.chosen.key)))

    def put(self, column: Column) -> str:
        """Adds a column and chooses it; its key.

        Raises:
            ValueError: there are 6 already, or one of this name.
        """
        if len(self.columns) >= MOST:
            raise ValueError(f"a comparison shows at most {MOST} plans: remove one first")
        if column.key in self.columns or column.name in [each.name for each in self.columns.values()]:
            raise ValueError(f"there is a plan {column.name!r} already: give this one another name")
        self.columns[column.key] = column
        self._after(column.key)
        return column.key

    def remove_column(self, key: str = "") -> None:
        """Takes a column out, the chosen one when none is named.

        Raises:
            ValueError: there is none of this key, or only 2 are left.
        """
        key = key or self.chosen.key
        if key not in self.columns:
            raise ValueError(f"there is no plan {key!r}; plans: {', '.join(self.columns)}")
        if len(self.columns) <= FEWEST:
            raise ValueError(f"a comparison needs at least {FEWEST} plans")
        del self.columns[key]
        self._after(self.picker.value if self.picker.value in self.columns else next(iter(self.columns)))

    def set_scheme(self, table: str, scheme: str) -> None:
        """Sets a table's scheme in the chosen column, which is made by hand from then on.

        Raises:
            ValueError: no such table or scheme, or a table that shares a menu.
        """
        if table not in self.menus:
            if table in self.sharing:
                raise ValueError(
                    f"table {table!r} shares one menu with {len(self.sharing)} small tables: set .others.value"
                )
            raise ValueError(f"there is no table {table!r}; tables: {', '.join(self.menus)}")
        self._make_hand()
        self.chosen.schemes[table] = checked_scheme(scheme)

    # ---- showing ----

    def show(self) -> None:
        """Brings the controls to what the chosen column says."""
        with self.quietly():
            entries = [(column.name, key) for key, column in self.columns.items()]
            now = self.picker.value if self.picker.value in self.columns else entries[0][1]
            if list(self.picker.options) != entries:
                self.picker.options = entries
            self.picker.value = now
            column = self.chosen
            self.title.value = column.name
            kinds = [(label, kind) for kind, label in KINDS.items() if kind != GIVEN or column.wish.plan is not None]
            if list(self.kind.options) != kinds:
                self.kind.options = kinds
            self.kind.value = column.kind
            for name, menu in self.menus.items():
                menu.value = column.schemes.get(name, AUTO)
            if self.others is not None:
                self.others.value = column.schemes.get(self.sharing[0], AUTO)
            for name, box in self.allowed.items():
                box.value = not column.allowed or name in column.allowed
        self._show_allowed()
        by_hand, given = column.kind == HAND, column.kind == GIVEN
        self._hand.layout.display = "" if by_hand else "none"
        self._planner.layout.display = "none" if by_hand or given else ""
        self.add.disabled = self.load.disabled = len(self.columns) >= MOST
        self.remove.disabled = len(self.columns) <= FEWEST

    def _show_allowed(self) -> None:
        """The fold of the planner's schemes, and how many they are."""
        used = sum(box.value for box in self.allowed.values())
        which = "all schemes" if used == len(self.allowed) else f"{used} of {len(self.allowed)} schemes"
        self.folded.description = f"The planner may use {which}"
        self.folded.icon = "caret-down" if self.folded.value else "caret-right"
        self._ticks.layout.display = "" if self.folded.value else "none"

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Controls that move inside answer nothing."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    # ---- moved by the reader ----

    def _moved(self, what: Callable[[], None]) -> None:
        if self._quiet:
            return
        try:
            what()
        except ValueError as error:
            self.show()
            self._tell(str(error))
            return
        self._changed()

    def _menu_moved(self, _: Any) -> None:
        self._moved(self._read_menus)

    def _read_menus(self) -> None:
        schemes = {name: menu.value for name, menu in self.menus.items()}
        if self.others is not None:
            schemes |= dict.fromkeys(self.sharing, self.others.value)
        self.chosen.schemes = schemes

    def _all_moved(self, change: Any) -> None:
        if not change["new"] or self._quiet:
            return
        with self.quietly():
            for menu in self.all_menus():
                menu.value = change["new"]
            self.set_all.value = ""
        self._moved(self._read_menus)

    def _allowed_moved(self, _: Any) -> None:
        def read() -> None:
            ticked = tuple(name for name, box in self.allowed.items() if box.value)
            if not ticked:
                raise ValueError("A planner that may use no scheme has no plan: leave at least one ticked.")
            self.chosen.allowed = () if len(ticked) == len(self.allowed) else ticked
            self._show_allowed()

        self._moved(read)

    def _kind_moved(self, change: Any) -> None:
        def make() -> None:
            if change["new"] == HAND:
                self._make_hand()
            else:
                self.chosen.kind = change["new"]
            self.show()

        self._moved(make)

    def _make_hand(self) -> None:
        """A given plan made by hand begins with its own schemes."""
        column = self.chosen
        plan = self._plan_of(column.key)
        if column.kind == GIVEN and not column.schemes and plan is not None:
            column.schemes = schemes_of(plan)
        column.kind = HAND

    def _renamed(self, change: Any) -> None:
        def rename() -> None:
            wanted = change["new"].strip()
            taken = [column.name for column in self.columns.values() if column is not self.chosen]
            if not wanted or wanted in taken:
                raise ValueError(f"There is a plan {wanted!r} already." if wanted else "A plan needs a name.")
            self.chosen.name = wanted
            self.show()

        self._moved(rename)

    def _loaded(self, file: str, text: str) -> None:
        plan = ShardingPlan.from_json(text)
        name = file.removesuffix(".json") or "from JSON"
        taken = [column.name for column in self.columns.values()]
        name = name if name not in taken else self._new_key()
        wish = next(iter(self.columns.values())).wish
        self.put(Column(name, name, GIVEN, replace(wish, plan=plan, constraints={}, options={})))

    def _told(self, what: Callable[[], Any]) -> None:
        """A mistake is a sentence on the page."""
        try:
            what()
        except ValueError as error:
            self._tell(str(error))

    def _after(self, key: str) -> None:
        with self.quietly():
            self.picker.options = [(column.name, each) for each, column in self.columns.items()]
            self.picker.value = key
        self.show()
        self._changed()

    def _new_key(self) -> str:
        taken = {*self.columns, *(column.name for column in self.columns.values())}
        while True:
            self._made += 1
            if f"Plan {self._made}" not in taken:
                return f"Plan {self._made}"
