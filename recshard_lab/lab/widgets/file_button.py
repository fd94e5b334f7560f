"""FileButton: a button that reads a file of the reader's machine and hands its text to Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

_ESM = """
function render({ model, el }) {
  const button = document.createElement("button"), input = document.createElement("input");
  button.type = "button"; button.className = "rs-file-button jupyter-button"; input.type = "file"; input.hidden = true;
  button.setAttribute("data-lm-suppress-shortcuts", "true");
  el.append(button, input);
  const show = () => {
    button.textContent = model.get("description"); button.title = model.get("tooltip");
    button.disabled = model.get("disabled"); input.accept = model.get("accept");
  };
  button.addEventListener("click", () => input.click());
  input.addEventListener("change", async () => {
    const file = input.files[0];
    if (file) model.send({ name: file.name, text: await file.text() });
    input.value = "";  // so that the same file can be chosen again
  });
  for (const key of ["description", "tooltip", "disabled", "accept"]) model.on("change:" + key, show);
  show();
}
export default { render };
"""

_CSS = """
.rs-file-button{font:inherit;font-size:var(--jp-widgets-font-size,13px);height:28px;padding:0 10px;cursor:pointer;
 border:none;color:var(--jp-ui-font-color1,inherit);background:var(--jp-layout-color2,transparent)}
.rs-file-button:disabled{opacity:.6;cursor:default}
"""


class FileButton(anywidget.AnyWidget):
    """A button that lets the reader choose a file.

    Args:
        description: on the button.
        tooltip: shown on hover.
        accept: endings and types of files that are offered, as in HTML.

    >>> button, read = FileButton("Plan from JSON"), []
    >>> button.on_file(lambda name, text: read.append((name, text)))
    >>> button.receive("mine.json", "{}")
    >>> read
    [('mine.json', '{}')]
    """

    _esm = _ESM
    _css = _CSS
    description = traitlets.Unicode().tag(sync=True)
    tooltip = traitlets.Unicode().tag(sync=True)
    accept = traitlets.Unicode().tag(sync=True)
    disabled = traitlets.Bool(False).tag(sync=True)

    def __init__(self, description: str, tooltip: str = "", accept: str = "", **layout: Any) -> None:
        self._callbacks: list[Callable[[str, str], None]] = []
        super().__init__(description=description, tooltip=tooltip, accept=accept, **layout)
        self.on_msg(lambda _, message, __: self.receive(str(message["name"]), str(message["text"])))

    def on_file(self, callback: Callable[[str, str], None]) -> None:
        """Calls `callback` with the name and the text of every file that is chosen."""
        self._callbacks.append(callback)

    def receive(self, name: str, text: str) -> None:
        """Hands a file to the callbacks, as choosing it does."""
        for callback in self._callbacks:
            callback(name, text)
