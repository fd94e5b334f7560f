"""The notebooks, example files and pages: in a checkout at ``notebooks/`` and ``docs/``, else as package data."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent / "notebooks"
_INSTALLED = _PACKAGE / "notebooks"
_PAGES = (
    "*.md",
    "concepts/*.md",
    "howto/*.md",
    "reference/*.md",
)  # of the docs, for links of notebooks; setup.py ships the same


def in_checkout() -> bool:
    """Whether the package was imported from a checkout of the repository."""
    return (_PACKAGE.parent / "pyproject.toml").is_file() and _CHECKOUT.is_dir()


def notebook_folder() -> Path:
    """The folder of the notebooks.

    Raises:
        FileNotFoundError: the installed package has none.

    >>> (notebook_folder() / "00_index.ipynb").is_file()
    True
    """
    folder = _CHECKOUT if in_checkout() else _INSTALLED
    if not any(folder.glob("*.ipynb")):
        raise FileNotFoundError(
            f"recshard_lab found no notebooks in {folder}: this installation does not contain its package data. "
            f"Fix: pip install --force-reinstall --no-deps recshard-lab"
        )
    return folder


def shipped_files() -> dict[Path, bytes]:
    """What ``recshard lab`` copies: path below the folder of the copies -> content.

    These are the notebooks, their pictures and examples, and below ``docs`` the pages to which notebooks link. Links
    between notebooks and pages are changed to lead to the copies.

    >>> Path("docs/serving.md") in shipped_files()
    True
    """
    notebooks = notebook_folder()
    docs = notebooks.parent / "docs" if in_checkout() else notebooks / "docs"
    found = {
        path.relative_to(notebooks): path.read_bytes().replace(b"](../docs/", b"](docs/")
        for path in sorted(notebooks.rglob("*"))
        if path.is_file() and not path.is_relative_to(docs)
    }
    for page in [page for kind in _PAGES for page in sorted(docs.glob(kind))]:
        place = Path("docs", page.relative_to(docs))
        found[place] = page.read_bytes().replace(b"../notebooks/", b"../")
    return {place: text for place, text in found.items() if not any(p.startswith((".", "__")) for p in place.parts)}


def example_text(name: str) -> str:
    """The text of an example file.

    >>> example_text("tables.yaml").startswith("# Tables")
    True
    """
    return (notebook_folder() / "examples" / name).read_text()
