"""The notebooks and example files: in a checkout at ``notebooks/``, in an installed package as package data."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent / "notebooks"
_INSTALLED = _PACKAGE / "notebooks"


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


def example_text(name: str) -> str:
    """The text of an example file.

    >>> example_text("tables.yaml").startswith("# Tables")
    True
    """
    return (notebook_folder() / "examples" / name).read_text()
