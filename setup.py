"""The packages of the wheel: the library, and the folder ``notebooks`` as the data of ``recshard_lab.notebooks``.

pyproject.toml has everything else. Its ``package-data`` says which files ship.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["recshard_lab*"]), "recshard_lab.notebooks"],
    package_dir={"recshard_lab.notebooks": "notebooks"},
)
