"""Links that leave docs/ in the repository and stay in the site: notebooks, and files of the repository.

A page is read in two places: in the repository, where ``../notebooks/01.ipynb`` is a file, and in the site, where the
notebook is a page of ``tutorials/``. Pages are written for the repository. This module translates them.
"""

import os
import re
from pathlib import Path, PurePosixPath

from docutils import nodes
from repository import REPOSITORY, ROOT
from sphinx.util.docutils import SphinxDirective

_TARGET = re.compile(r"(\]\()([^)\s]+?)(#[^)\s]*)?(\))")
NOTEBOOKS, TUTORIALS, DOCS = "notebooks", "docs/tutorials", "docs"


def origin(docname: str, suffix: str) -> str:
    """The file in the repository from which a page comes, as a path from the root.

    >>> origin("tutorials/00_index", ".ipynb"), origin("howto/serve", ".md")
    ('notebooks/00_index.ipynb', 'docs/howto/serve.md')
    """
    path = f"{DOCS}/{docname}{suffix}"
    return path.replace(TUTORIALS, NOTEBOOKS, 1) if suffix == ".ipynb" or docname == "tutorials/TEACHING" else path


def translated(text: str, source: str, page: str) -> str:
    """`text` with links as the site has them.

    Args:
        text: Markdown, or the JSON of a notebook.
        source: the file's path in the repository.
        page: its path in the site's source, from the root.

    >>> translated("[a](../docs/glossary.md#bag)", "notebooks/01.ipynb", "docs/tutorials/01.ipynb")
    '[a](../glossary.md#bag)'
    """

    def new(match: re.Match[str]) -> str:
        start, target, anchor, end = match.groups()
        if re.match(r"[a-z]+:", target) or target.startswith(("#", "/")):
            return match[0]
        path = os.path.normpath(PurePosixPath(source).parent / target)
        if path.startswith("..") or not (ROOT / path).exists():
            return match[0]  # the builder reports it
        return f"{start}{_in_site(path, page)}{anchor or ''}{end}"

    return _TARGET.sub(new, text)


def _in_site(path: str, page: str) -> str:
    inside = path
    if path == "README.md":
        inside = f"{DOCS}/index.md"
    elif path.startswith(f"{NOTEBOOKS}/") and Path(path).suffix in (".ipynb", ".svg", ".md"):
        inside = path.replace(NOTEBOOKS, TUTORIALS, 1)
    elif not path.startswith(f"{DOCS}/"):
        return REPOSITORY.file(path)
    return os.path.relpath(inside, PurePosixPath(page).parent)


def copy_notebooks(into: Path) -> None:
    """Copies notebooks, pictures and the lesson plan into the site's source. Removes copies without an original."""
    folder = ROOT / NOTEBOOKS
    originals = [*folder.glob("*.ipynb"), folder / "TEACHING.md", *folder.glob("images/*.svg")]
    kept = {into / file.relative_to(folder): file for file in originals}
    for old in [*into.glob("*.ipynb"), *into.glob("images/*.svg")]:
        if old not in kept:
            old.unlink()
    for new, file in kept.items():
        new.parent.mkdir(exist_ok=True)
        if not new.exists() or new.read_bytes() != file.read_bytes():
            new.write_bytes(file.read_bytes())


class Chapter(SphinxDirective):
    """``{chapter} 5 10``: a table of contents of the notebooks from one number to another."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        first, last = map(int, self.arguments)
        names = sorted(file.stem for file in (ROOT / NOTEBOOKS).glob("*.ipynb"))
        chosen = [name for name in names if first <= int(name[:2]) <= last]
        return self.parse_text_to_nodes("\n".join(["```{toctree}", ":maxdepth: 1", "", *chosen, "```"]))
