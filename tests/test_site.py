"""The built site of docs/: links lead somewhere, newcomers' questions are two clicks away, nothing needs a network.

The tests need the extra "docs". ``RECSHARD_SITE`` names a site that is built already, as in ``.ci/run``.
"""

import doctest
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser.lab_server import CHROMIUM
from tests.grid import every

ROOT = Path(__file__).parents[1]
pytest.importorskip("sphinx", reason='the site needs pip install -e ".[docs]"')

QUESTIONS = {
    "How do I install it?": ("howto/set_up.html", "set-up", 'pip install -e ".[cpu]"'),
    "Which scheme for a 5 GB table with 20 ids a bag on 8 GPUs?": (
        "howto/plan.html",
        "which-scheme-for-one-table",
        "5 GB table with 20 ids",
    ),
    "Why is my rank out of memory?": ("howto/out_of_memory.html", "which-rank-and-why", "OutOfMemoryError"),
    "How do I resume?": ("howto/checkpoint.html", "resume-a-run", "another number of ranks"),
    "I have one GPU.": ("howto/gpus.html", "one-gpu", "share_gpu=True"),
    "What is in tables.yaml?": ("reference/schemas.html", "file-of-tables", "num_embeddings"),
    "How do I write my own loop?": ("howto/train.html", "your-own-loop", "dense_parameters"),
    "How do I use per-sample weights and sequences?": (
        "howto/train.html",
        "sequences-and-per-sample-weights",
        "is_weighted=True",
    ),
    "How do I start a TorchRec script on several ranks?": (
        "howto/from_torchrec.html",
        "start-it-on-several-ranks",
        "torchrun",
    ),
    "Must a scheme be registered on the ranks?": ("howto/extend.html", "extend", "needed on the ranks too"),
    "What does kernel mean?": ("glossary.html", "kernel", "three meanings"),
    "How far can I trust a prediction?": (
        "concepts/cost_model.html",
        "how-far-to-trust-a-prediction",
        "error",
    ),
    "How do I serve a model?": ("howto/serve.html", "serve-a-model", "recshard serve"),
}


class Page(HTMLParser):
    """Links, ids, loaded files and text of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.loads: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.ids.add(str(found["id"]))
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if tag in ("script", "img", "iframe", "source") and found.get("src"):
            self.loads.append(str(found["src"]))
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload") and found.get("href"):
            self.loads.append(str(found["href"]))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site."""
    if "RECSHARD_SITE" in os.environ:
        return Path(os.environ["RECSHARD_SITE"])
    folder = tmp_path_factory.mktemp("site")
    options = ["-q", "-W", "--keep-going", "-b", "html"]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[str, Page]:
    """Path in the site -> page."""
    return {file.relative_to(site).as_posix(): Page(file.read_text()) for file in site.rglob("*.html")}


def targets(name: str, page: Page) -> Iterator[tuple[str, str]]:
    """(path in the site, anchor) of every link that stays in it."""
    for link in page.links:
        parts = urlsplit(link)
        if not parts.scheme and not parts.netloc and not link.startswith("/"):
            path = os.path.normpath(os.path.join(os.path.dirname(name), unquote(parts.path))) if parts.path else name
            yield path, unquote(parts.fragment)


def test_every_link_inside_the_site_leads_to_a_file_and_an_anchor(site: Path, pages: dict[str, Page]) -> None:
    dead = [
        f"{name} -> {path}#{anchor}"
        for name, page in pages.items()
        for path, anchor in targets(name, page)
        if (path not in pages and not (site / path).is_file())
        or (anchor and path in pages and anchor not in pages[path].ids)
    ]
    assert dead == []
    assert len(pages) > 60


def test_no_page_loads_anything_from_another_site(pages: dict[str, Page]) -> None:
    assert [(name, link) for name, page in pages.items() for link in page.loads if urlsplit(link).netloc] == []


@every(QUESTIONS)
def test_a_newcomers_question_is_answered_at_most_two_clicks_from_the_front_page(
    question: str, pages: dict[str, Page]
) -> None:
    path, anchor, answer = QUESTIONS[question]
    assert anchor in pages[path].ids
    assert answer in " ".join("".join(pages[path].text).split())
    first = dict.fromkeys(targets("index.html", pages["index.html"]))
    second = {there for page, _ in first if page in pages for there in targets(page, pages[page])}
    assert {(path, anchor), (path, "")} & {*first, *second}


def test_every_public_name_of_every_day_is_described(pages: dict[str, Page]) -> None:
    stub = (ROOT / "recshard_lab" / "__init__.pyi").read_text()
    names = re.findall(r"^from \.\w+ import (\w+) as", stub, re.MULTILINE)
    described = {identity.rpartition(".")[2] for page in pages.values() for identity in page.ids if "." in identity}
    assert [name for name in names if name not in described] == []


def test_every_command_has_a_page(pages: dict[str, Page]) -> None:
    text = " ".join("".join(pages["reference/cli/index.html"].text).split())
    assert "recshard plan" in text
    assert "--constraints FILE" in " ".join("".join(pages["reference/cli/plan_make.html"].text).split())


WITHOUT = """
import importlib.abc, importlib.metadata, sys
from packaging.requirements import Requirement

def brought(project, extras):
    found, ahead = set(), [(project, "", *extras)]
    while ahead:
        name, *extras = ahead.pop()
        if (name, *extras) in found:
            continue
        found.add((name, *extras))
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # for another platform
            continue
        for requirement in map(Requirement, lines):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                ahead.append((requirement.name.lower().replace("_", "-"), "", *sorted(requirement.extras)))
    return {name for name, *_ in found}

there = brought("recshard-lab", ["cpu", "docs"])
absent = {module for module, projects in importlib.metadata.packages_distributions().items()
          if not there.intersection(project.lower().replace("_", "-") for project in projects)}
assert {"uvicorn", "pytest"} <= absent and not absent & {"torch", "sphinx"}, absent

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_pages_of_the_api_need_only_the_extras_cpu_and_docs(tmp_path: Path) -> None:
    page = "reference/api/serving"  # of the largest extra; every page is written, and this one is built
    options = ["-D", f"include_patterns={page}.rst", "-D", f"root_doc={page}", "-D", "suppress_warnings=toc"]
    command = [sys.executable, "-c", WITHOUT, "-q", "-W", *options, "-b", "text", str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    text = " ".join((tmp_path / f"{page}.txt").read_text().split())
    assert "Client(address: str, token: str | None = None, timeout_s: float = 30.0)" in text
    assert "predict_batch( batch: Batch, ) -> dict[str, Tensor] Outputs of B samples, as tensors" in text


@pytest.mark.browser
def test_the_search_answers_without_a_network_and_pages_fit_a_narrow_screen(site: Path) -> None:
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page(viewport={"width": 400, "height": 800})
        page.goto((site / "search.html").as_uri() + "?q=resume")
        page.wait_for_selector("#search-results li a")
        assert "Checkpoint and resume" in page.inner_text("#search-results")
        for name in ("index", "howto/plan", "tutorials/06_sharding_schemes", "reference/schemas"):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 400, name
        browser.close()


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    return importlib.import_module("repository")


def test_buttons_badge_and_install_cell_follow_from_the_repository_in_pyproject(repository: object) -> None:
    kind = repository.Repository  # type: ignore[attr-defined]
    github = kind("https://github.com/who/lab.git")
    assert github.binder("notebooks/01_a.ipynb") == (
        "https://mybinder.org/v2/gh/who/lab/main?urlpath=lab%2Ftree%2Fnotebooks%2F01_a.ipynb"
    )
    assert 'href="https://colab.research.google.com/github/who/lab/blob/main/notebooks/01_a.ipynb"' in github.buttons(
        "notebooks/01_a.ipynb"
    )
    assert github.install_cell("cpu") == '%pip install -q "recshard-lab[cpu] @ git+https://github.com/who/lab.git"'
    elsewhere = kind("https://git.host.net/lab.git")
    assert elsewhere.binder("a.ipynb").startswith(
        "https://mybinder.org/v2/git/https%3A%2F%2Fgit.host.net%2Flab.git/main"
    )
    assert elsewhere.colab("a.ipynb") is None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert repository.REPOSITORY.url == project["urls"]["Repository"]  # type: ignore[attr-defined]
    placeholder = kind("https://example.org/lab.git").buttons("a.ipynb")
    assert "href" not in placeholder
    assert placeholder.count('aria-disabled="true"') == 2


@pytest.mark.parametrize("module", ["repository", "links", "commands"])
def test_the_examples_of_the_extensions_hold(module: str, repository: object) -> None:
    found = doctest.testmod(importlib.import_module(module))
    assert (found.failed, found.attempted > 0) == (0, True)
