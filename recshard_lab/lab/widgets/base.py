"""What every widget here does alike: it takes keys, shows where the focus is, follows the theme, and answers while a
cell is running.

Keys: JupyterLab takes arrows, Enter and letters for its own from whatever has the focus, unless that asks it not to.
Focus: a ring of two colours, of which one stands out from any ground.
While a cell is running: JupyterLab sends what is done on the page to a subshell of the kernel, a thread of its own.
From 7.4 on ipykernel hands a message back to the shell that last spoke to the widget, which is the one whose cell is
running, and so the click waits for the cell. Here it is asked not to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anywidget
import ipywidgets as ipw

# ipykernel's routing of a comm's messages, an attribute of its comms from 7.4 on; a comm without it is not routed
_ROUTE = "_reply_subshell_for"

_ESM = """
function render({ el }) {
  el.hidden = true;
  const guard = () => {
    if (!el.isConnected) return requestAnimationFrame(guard);
    const all = el.closest("[class*='recshard-']") || el.parentElement;
    all.addEventListener("focusin", event => event.target.setAttribute("data-lm-suppress-shortcuts", "true"));
  };
  guard();
}
export default { render };
"""

_ARROW = (
    "url(\"data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' width='18' height='18' fill='none' "
    "stroke='%23e4e7ea' stroke-width='2'%3E%3Cpath d='M5 7l4 4 4-4'/%3E%3C/svg%3E\")"
)

_CSS = f"""
[class*='recshard-'] :is(button,select,input,textarea,summary):focus-visible{{
 outline:2px solid var(--jp-brand-color1,#1976d2)!important;outline-offset:1px;
 box-shadow:0 0 0 5px var(--jp-layout-color1,#fff)!important}}
[data-jp-theme-light='false'] [class*='recshard-']{{--jp-widgets-dropdown-arrow:{_ARROW}}}
.rs-foot>*{{flex:0 1 auto;max-width:100%;min-width:0}}
.rs-foot>:has(details[open]){{flex:1 1 100%}}
.rs-foot summary{{min-height:28px;line-height:28px;margin-top:6px;cursor:pointer}}
@media (prefers-reduced-motion:reduce){{[class*='recshard-'] *{{transition:none!important;animation:none!important}}}}
@media (forced-colors:active){{
 [class*='recshard-'] svg{{forced-color-adjust:none;color:CanvasText}}
 [class*='recshard-'] .rs-bar{{forced-color-adjust:none;background:CanvasText}}
 [class*='recshard-'] button.mod-active{{border:2px solid Highlight}}
}}
"""


class Manners(anywidget.AnyWidget):
    """Nothing to see: the keys and the style of the widget it lies in."""

    _esm = _ESM
    _css = _CSS


class LabWidget(ipw.VBox):
    """A widget of the lab; its class on the page begins with ``recshard-``.

    Args:
        children: from top to bottom.

    >>> LabWidget([ipw.Button()]).children[1]
    Button(style=ButtonStyle())
    """

    def __init__(self, children: Sequence[ipw.Widget] = (), **given: Any) -> None:
        super().__init__([Manners(), *children], **given)
        self.layout.padding = "0 0 0 12px"  # views beside it begin there
        answer_while_busy(self)


def answer_while_busy(widget: ipw.Widget) -> None:
    """Has a widget and all inside it, now and later, answered while a cell is running, under every ipykernel."""
    comm = widget.comm
    if comm is not None and getattr(comm, _ROUTE, None) is not None:
        setattr(comm, _ROUTE, None)
    if isinstance(widget, ipw.Box):
        for child in widget.children:
            answer_while_busy(child)
        widget.observe(_answer_new, names="children")


def _answer_new(change: Any) -> None:
    for child in set(change["new"]) - set(change["old"]):
        answer_while_busy(child)
