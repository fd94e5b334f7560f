"""Links that depend on the repository's address: `Repository` in `project.urls` of pyproject.toml, and nothing else.

The address is a placeholder until there is a public repository. The buttons are then shown without a link.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BRANCH = "main"


@dataclass(frozen=True)
class Repository:
    """A Git repository.

    Args:
        url: where `git clone` finds it.

    >>> Repository("https://github.com/who/lab.git").colab("notebooks/00_index.ipynb")
    'https://colab.research.google.com/github/who/lab/blob/main/notebooks/00_index.ipynb'
    >>> Repository("https://git.host.net/lab.git").colab("notebooks/00_index.ipynb") is None  # Colab reads GitHub only
    True
    """

    url: str

    @property
    def web(self) -> str:
        """The address for browsers."""
        return self.url.removesuffix(".git")

    @property
    def is_placeholder(self) -> bool:
        """Whether the address belongs to nobody."""
        return urlsplit(self.url).hostname == "example.org"

    @property
    def github(self) -> str | None:
        """``owner/name`` on GitHub, or None."""
        parts = urlsplit(self.web)
        return parts.path.strip("/") if parts.hostname == "github.com" else None

    def file(self, path: str) -> str:
        """The page of a file."""
        return f"{self.web}/blob/{BRANCH}/{path}"

    def binder(self, notebook: str) -> str | None:
        """Where Binder builds the repository's image and opens a notebook; None for a placeholder."""
        if self.is_placeholder:
            return None
        source = f"gh/{self.github}" if self.github else f"git/{quote(self.url, safe='')}"
        return f"https://mybinder.org/v2/{source}/{BRANCH}?urlpath={quote(f'lab/tree/{notebook}', safe='')}"

    def colab(self, notebook: str) -> str | None:
        """Where Colab opens a notebook; None if the repository is not on GitHub."""
        return (
            f"https://colab.research.google.com/github/{self.github}/blob/{BRANCH}/{notebook}" if self.github else None
        )

    def install_cell(self, extra: str) -> str:
        """The first cell of a notebook on Colab."""
        return f'%pip install -q "{PROJECT["name"]}[{extra}] @ git+{self.url}"'

    def buttons(self, notebook: str) -> str:
        """Both buttons as HTML."""
        places = {"Binder": self.binder(notebook), "Colab": self.colab(notebook)}
        return '<div class="launch">' + "".join(_button(name, url) for name, url in places.items()) + "</div>"


def _button(name: str, url: str | None) -> str:
    if url is not None:
        return f'<a class="launch-button" href="{url}" rel="noopener">Open in {name}</a>'
    why = f"This link works once pyproject.toml names a public repository that {name} can read."
    return f'<span class="launch-button" role="link" aria-disabled="true" title="{why}">Open in {name}</span>'


REPOSITORY = Repository(PROJECT["urls"]["Repository"])


class InstallCell(SphinxDirective):
    """``{install-cell} cpu``: the cell that installs this project in a notebook elsewhere."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        code = REPOSITORY.install_cell(self.arguments[0])
        return [nodes.literal_block(code, code, language="text")]


class LaunchButtons(SphinxDirective):
    """``{launch-buttons} notebooks/00_index.ipynb``: Binder and Colab."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", REPOSITORY.buttons(self.arguments[0]), format="html")]
