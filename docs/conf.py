"""The documentation site: ``python -m sphinx -W docs OUT``. It needs ``pip install -e ".[cpu,docs]"``.

Notebooks are never executed here. Their stored outputs are shown, which tests compare with fresh runs. Links to other
sites are only followed if ``RECSHARD_DOCS_ONLINE=1``: a build needs no network.
"""

import os
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

import api  # noqa: E402
import commands  # noqa: E402
import links  # noqa: E402
from repository import PROJECT, REPOSITORY, InstallCell, LaunchButtons  # noqa: E402
from schemas import SchemaTable  # noqa: E402
from sphinx.ext.autodoc.mock import mock  # noqa: E402

import recshard_lab  # noqa: E402

warnings.filterwarnings("ignore", category=DeprecationWarning)  # of imported packages; Sphinx's own are its warnings

project, author = "recshard_lab", PROJECT["authors"][0]["name"]
copyright = author
release = version = recshard_lab.__version__
online = os.environ.get("RECSHARD_DOCS_ONLINE") == "1"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    *(["sphinx.ext.intersphinx"] if online else []),
]
exclude_patterns = ["_build", "_ext", "**/.ipynb_checkpoints"]
templates_path = ["_templates"]

nb_execution_mode = "off"
nb_merge_streams = True
nb_mime_priority_overrides = [
    ("html", kind, order)
    for order, kind in enumerate(["text/html", "image/svg+xml", "image/png", "text/markdown", "text/plain"])
]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# of the extra "serving", which the extra "docs" does not bring: no signature shows them
autodoc_mock_imports = ["orjson", "safetensors", "starlette", "uvicorn"]
python_maximum_signature_line_length = 88
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_rtype, napoleon_use_ivar = False, True
python_use_unqualified_type_names = True

intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "torch": ("https://docs.pytorch.org/docs/stable", None),
    "numpy": ("https://numpy.org/doc/stable", None),
}

linkcheck_ignore = [r"https://example\.org/"] if online else [r"https?://"]  # python -m sphinx -b linkcheck docs OUT

html_theme = "furo"
html_title = f"recshard_lab {release}"
html_static_path = ["_static"]
html_css_files, html_js_files = ["site.css"], ["site.js"]
html_theme_options = {"source_repository": REPOSITORY.web, "source_branch": "main", "source_directory": "docs/"}
if REPOSITORY.is_placeholder:
    html_theme_options = {}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def _translate_links(app, docname, source):
    file = Path(app.env.doc2path(docname))
    page = f"docs/{file.relative_to(HERE).as_posix()}"
    source[0] = links.translated(source[0], links.origin(docname, file.suffix), page)


def _add_buttons(app, pagename, templatename, context, doctree):
    if pagename.startswith("tutorials/") and (HERE.parent / "notebooks" / f"{Path(pagename).name}.ipynb").exists():
        context["body"] = REPOSITORY.buttons(f"notebooks/{Path(pagename).name}.ipynb") + context["body"]


def setup(app):
    """Writes the generated pages, and registers the directives."""
    links.copy_notebooks(HERE / "tutorials")
    with mock(autodoc_mock_imports):
        api.write_pages(HERE / "reference" / "api")
    commands.write_pages(HERE / "reference" / "cli")
    app.connect("source-read", _translate_links)
    app.connect("html-page-context", _add_buttons)
    app.add_directive("chapter", links.Chapter)
    app.add_directive("schema", SchemaTable)
    app.add_directive("install-cell", InstallCell)
    app.add_directive("launch-buttons", LaunchButtons)
