"""What an import costs: neither the package nor a rank's measuring job loads a notebook's libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("IPython", "plotly", "ipywidgets", "jupyterlab", "anywidget")


@pytest.mark.gate
@pytest.mark.parametrize(
    "statement",
    [
        "import recshard_lab",
        "import recshard_lab.lab",
        "import recshard_lab.lab.compare.measure",
        "from recshard_lab.lab import views; views.curves({'a': [1.0, 0.5]}).svg",
        "from recshard_lab.lab import write_report",
    ],
)
def test_no_notebook_library_is_loaded(statement: str) -> None:
    code = f"import sys\n{statement}\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stderr
