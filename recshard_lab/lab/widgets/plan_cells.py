"""Room for every plan of a comparison: its card in one grid, its picture and its Python in another."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as ipw

from recshard_lab.lab.widgets import controls


class PlanCells:
    """Cards, pictures and pieces of Python by the key of their plan, in grids that wrap where the page is narrow."""

    def __init__(self) -> None:
        self.cards: dict[str, ipw.HTML] = {}
        self.pictures: dict[str, ipw.HTML] = {}
        self.codes: dict[str, ipw.HTML] = {}
        self.card_grid, self.picture_grid = controls.columns_of("250px"), controls.columns_of("440px")
        self.card_grid.add_class("rs-cards")

    @property
    def picture_width(self) -> int:
        """Pixels that a picture is drawn for: two or three are in a row of a wide page. It is never blown up."""
        return controls.HALF_WIDTH if self._two_in_a_row else controls.THIRD_WIDTH

    @property
    def _two_in_a_row(self) -> bool:
        return len(self.cards) in (2, 4)

    def arrange(self, keys: Sequence[str]) -> None:
        """Makes room for these plans; what was there of them stays."""
        if list(self.cards) == list(keys):
            return
        for kept in (self.cards, self.pictures, self.codes):
            old = dict(kept)
            kept.clear()
            kept.update({key: old.get(key) or controls.wide_html() for key in keys})
        least = {
            self.card_grid: "250px" if len(keys) <= 3 else "168px",  # in one row while there is room
            self.picture_grid: "440px" if self._two_in_a_row else "340px",
        }
        for grid, width in least.items():
            grid.layout.grid_template_columns = f"repeat(auto-fit, minmax(min(100%, {width}), 1fr))"
        pairs = zip(self.pictures.values(), self.codes.values(), strict=True)
        below = [ipw.VBox(pair, layout=ipw.Layout(width="100%", min_width="0")) for pair in pairs]
        self.card_grid.children, self.picture_grid.children = tuple(self.cards.values()), tuple(below)
