"""constraints.txt pins what CI installs, by versions that pyproject.toml allows and that any machine can install."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.grid import every

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
PINNED = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in LINES)}
INSTALLED = [
    *PROJECT["dependencies"],
    *PROJECT["optional-dependencies"]["cpu"],
    *PROJECT["optional-dependencies"]["test"],
    *PROJECT["optional-dependencies"]["docs"],
]


def test_every_line_is_a_name_and_a_version_without_paths_hosts_or_builds() -> None:
    assert [line for line in LINES if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line)] == []
    assert len(PINNED) == len(LINES) > 100


@every(sorted(set(INSTALLED)))
def test_every_requirement_of_the_project_is_pinned_to_a_version_that_it_allows(wanted: str) -> None:
    requirement = Requirement(wanted)
    assert requirement.specifier.contains(PINNED[canonicalize_name(requirement.name)])


def test_the_project_itself_is_not_pinned() -> None:
    assert canonicalize_name(PROJECT["name"]) not in PINNED


def test_ci_installs_the_pinned_versions() -> None:
    lines = (ROOT / ".ci/environment").read_text().splitlines()
    installs = [line for line in lines if "pip install" in line and "-e" in line]
    commands = [line for line in installs if not line.lstrip().startswith("section")]
    assert commands
    assert all("-c constraints.txt" in line for line in commands)
