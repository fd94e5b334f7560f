"""The packages of the wheel: the library, and the folder ``notebooks`` as the data of ``recshard_lab.notebooks``.

pyproject.toml has everything else. Its ``package-data`` lists the files of the wheel that are not Python. Pages of
``docs`` that notebooks link to ship as ``notebooks/docs``: a package has no data outside its folder.
"""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

PAGES = ("*.md", "concepts/*.md", "howto/*.md", "reference/*.md")  # of docs/; as in recshard_lab/shipped.py


class BuildWithPages(build_py):
    """Adds the pages to a build; an editable installation reads them in the checkout."""

    def run(self) -> None:
        super().run()
        docs = Path("docs")
        for path in [] if self.editable_mode else [page for kind in PAGES for page in docs.glob(kind)]:
            target = Path(self.build_lib, "recshard_lab/notebooks", path)
            self.mkpath(str(target.parent))
            self.copy_file(str(path), str(target))


setup(
    packages=[*find_packages(include=["recshard_lab*"]), "recshard_lab.notebooks"],
    package_dir={"recshard_lab.notebooks": "notebooks"},
    cmdclass={"build_py": BuildWithPages},
)
