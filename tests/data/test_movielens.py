"""Every published layout reads to the same samples; what is malformed is refused by file and line."""

import functools
import hashlib
import http.server
import os
import shutil
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import requests

from recshard_lab.data import MovieLens, MovieLensNotFoundError, load_ratings
from recshard_lab.data import movielens as module
from tests.data.files import CLICKS, MOVIES, RATINGS, USERS, WRITERS

_REAL_UNREACHABLE = module._unreachable


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No variable, an empty cache, no network."""
    monkeypatch.delenv("RECSHARD_MOVIELENS", raising=False)
    cache = tmp_path / "cache"
    monkeypatch.setattr(module, "cache_folder", lambda: cache)
    monkeypatch.setattr(module, "_unreachable", lambda url: "no network in this test")
    return cache


@pytest.fixture(params=list(WRITERS))
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    folder = tmp_path / "release"
    folder.mkdir()
    WRITERS[request.param](folder)
    return request.param, folder


def zipped(folder: Path, archive: Path, inside: str) -> Path:
    with zipfile.ZipFile(archive, "w") as target:
        for file in sorted(folder.iterdir()):
            target.write(file, f"{inside}{file.name}")
    return archive


def genres_of(data: object) -> list[list[str]]:
    bags = data.columns["genres"].to_dense()  # type: ignore[attr-defined]
    return [[data.names["genres"][genre] for genre in bag.tolist()] for bag in bags]  # type: ignore[attr-defined]


def test_every_layout_reads_to_the_same_ratings(layout: tuple[str, Path]) -> None:
    name, folder = layout
    data = MovieLens.load(folder)
    assert data.columns["user"].tolist() == USERS
    assert data.columns["movie"].tolist() == MOVIES
    assert data.label.tolist() == CLICKS
    assert data.timestamps.tolist() == [row[3] for row in RATINGS]
    unknown = {"100k": ["unknown"], "recbole": ["unknown"], "1m": ["Drama"], "latest-small": [], "10m": []}[name]
    toy, heat = ["Animation", "Comedy"], ["Action"]
    assert genres_of(data) == [toy, toy, heat, unknown, heat]
    assert data.names["movie"][0] == "Toy Story (1995)"
    assert data.names["movie"][1] == "Misérables, Les"
    assert data.origin == f"path {folder}"
    assert data.source.startswith("MovieLens ")
    assert data.source.endswith(", 5 ratings")
    if name in ("latest-small", "10m"):
        assert data.feature_names == ["user", "movie", "genres"]
        return
    told = {
        key: [data.names[key][row] for row in data.columns[key].tolist()] for key in ("age", "gender", "occupation")
    }
    assert told["age"] == ["18-24", "50-55", "18-24", "50-55", "50-55"]
    assert told["gender"] == ["M", "F", "M", "F", "F"]
    assert set(told["occupation"]) == {"technician/engineer" if name == "1m" else "technician", "writer"}


@pytest.mark.parametrize("archive", ["ml.zip", "recbole-1.2.1-py3-none-any.whl"])
@pytest.mark.parametrize("inside", ["", "deep/down/in/it/"])
def test_an_archive_and_a_folder_above_read_alike(layout: Any, archive: str, inside: str, tmp_path: Path) -> None:
    data = MovieLens.load(zipped(layout[1], tmp_path / archive, inside))
    assert data.columns["user"].tolist() == USERS
    shutil.copytree(layout[1], tmp_path / "outer" / "a" / "b")
    assert MovieLens.load(tmp_path / "outer").columns["user"].tolist() == USERS


@pytest.mark.parametrize(
    ("name", "file", "line", "text", "reason"),
    [
        ("100k", "u.data", 2, "2\t1\t3", "expected 4 fields"),
        ("100k", "u.data", 1, "1\t1\t6\t300", "rating must be one of 1, 2, 3, 4, 5, got '6'"),
        ("100k", "u.data", 4, "2\t9\t3\t100", "movie '9' is not in"),
        ("100k", "u.data", 2, "2\t1\t3\tnoon", "timestamp must be an integer, got 'noon'"),
        ("100k", "u.user", 2, "2|old|F|writer|94043", "age must be an integer, got 'old'"),
        ("100k", "u.user", 2, "2|53|X|writer|94043", "gender must be M or F"),
        ("100k", "u.item", 1, "1|Toy Story (1995)|a||b|" + "|".join("2" * 19), "genre flags must be 0 or 1"),
        ("1m", "users.dat", 1, "1::M::18::21::48067", "occupation must be 0 to 20"),
        ("1m", "movies.dat", 3, "1::Heat (1995)::Action", "movie '1' appears a second time"),
        ("10m", "ratings.dat", 3, "1::3::4.25::200", "rating must be one of 0.5"),
        ("10m", "movies.dat", 2, "2::Misérables, Les", "expected 3 fields"),
        ("latest-small", "ratings.csv", 1, "userId,movieId,rating", "expected the header"),
        ("latest-small", "movies.csv", 2, "1,Toy, Story,Action", "expected 3 fields"),
        ("latest-small", "movies.csv", 4, '3,"Heat"x,Action', "expected after"),
        ("recbole", "ml-100k.inter", 1, "user_id:token\titem_id:token\trating:float", "lacks timestamp"),
        ("recbole", "ml-100k.inter", 4, "1\t3\t4", "expected 4 tab separated fields, got 3"),
        ("recbole", "ml-100k.item", 2, "1\tToy\t1995\tAnimation Cartoon", "'Cartoon' is not a genre"),
    ],
)
def test_a_malformed_line_is_refused_by_file_and_number(
    tmp_path: Path, name: str, file: str, line: int, text: str, reason: str
) -> None:
    WRITERS[name](tmp_path)
    encoding = "utf-8" if name in ("latest-small", "recbole", "10m") else "latin-1"
    lines = (tmp_path / file).read_text(encoding=encoding).splitlines()
    lines[line - 1] = text
    (tmp_path / file).write_text("\n".join(lines) + "\n", encoding=encoding)
    with pytest.raises(ValueError, match=rf"{file}, line {line}: .*") as caught:
        load_ratings(tmp_path)
    assert reason in str(caught.value)


def test_a_place_without_the_files_says_which_were_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WRITERS["latest-small"](tmp_path)
    (tmp_path / "movies.csv").write_bytes(b"movieId,title,genres\n1,Caf\xe9,Action\n")
    with pytest.raises(ValueError, match=r"movies\.csv, line 2: not utf-8"):
        MovieLens.load(tmp_path)
    (tmp_path / "movies.csv").unlink()
    (tmp_path / "u.data").write_text("1\t1\t5\t300\n")
    with pytest.raises(ValueError, match=r"Expected side by side .*u\.data, u\.user, u\.item"):
        load_ratings(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_ratings(tmp_path / "nothing")
    with pytest.raises(ValueError, match="neither a folder nor a zip"):
        load_ratings(tmp_path / "u.data")
    monkeypatch.setenv("RECSHARD_MOVIELENS", os.devnull + "/nothing")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_ratings()  # synthetic ratings never stand in for a wrong variable
    WRITERS["100k"](tmp_path)
    (tmp_path / "u.data").write_text("\n")
    with pytest.raises(ValueError, match=r"u\.data is empty"):
        MovieLens.load(tmp_path)


def test_several_releases_in_one_place_need_a_variant(tmp_path: Path) -> None:
    for name in ("100k", "1m"):
        (tmp_path / name).mkdir()
        WRITERS[name](tmp_path / name)
    with pytest.raises(ValueError, match="several MovieLens releases"):
        MovieLens.load(tmp_path)
    assert MovieLens.load(tmp_path, variant="1m").source == "MovieLens 1M, 5 ratings"
    with pytest.raises(ValueError, match="not variant 'latest-small'"):
        MovieLens.load(tmp_path, variant="latest-small")
    with pytest.raises(ValueError, match="variant must be one of"):
        MovieLens.load(tmp_path, variant="40m")


def test_sources_are_tried_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nowhere: Path) -> None:
    for name in ("100k", "1m"):
        (tmp_path / name).mkdir()
        WRITERS[name](tmp_path / name)
    nowhere.mkdir()
    archive = zipped(tmp_path / "100k", nowhere / "ml-100k.zip", "ml-100k/")
    monkeypatch.setitem(module._HASHES, "100k", "md5:" + _md5(archive))
    assert load_ratings().origin == f"cache {archive}"
    monkeypatch.setenv("RECSHARD_MOVIELENS", str(tmp_path / "1m"))
    assert load_ratings().origin == f"$RECSHARD_MOVIELENS={tmp_path / '1m'}"
    assert load_ratings(tmp_path / "100k").origin == f"path {tmp_path / '100k'}"


def _md5(file: Path) -> str:
    return hashlib.md5(file.read_bytes()).hexdigest()


def test_without_any_source_the_ratings_are_synthetic_and_say_so() -> None:
    with pytest.raises(MovieLensNotFoundError, match="no network in this test"):
        MovieLens.load()
    data = load_ratings()
    assert data.source.startswith("synthetic ratings")
    assert "no MovieLens file found" in data.source
    for place in ("no path given", "$RECSHARD_MOVIELENS not set", "ml-100k.zip", "no network in this test"):
        assert place in data.origin
    assert "download=False" in load_ratings(download=False).origin


def test_a_silent_network_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def silence(*args: object, **options: object) -> None:
        released.wait(10)
        raise requests.ConnectionError

    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(requests, "head", silence)
    assert _REAL_UNREACHABLE("https://example.invalid/x.zip") == "no answer within 0.2 s"
    released.set()


def test_a_refused_connection_is_a_reason_not_a_crash() -> None:
    assert _REAL_UNREACHABLE("http://127.0.0.1:9/x.zip") in ("ConnectionError", "ProxyError")


def test_a_download_is_checked_kept_and_read_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nowhere: Path
) -> None:
    site = tmp_path / "site"
    (tmp_path / "100k").mkdir()
    site.mkdir()
    WRITERS["100k"](tmp_path / "100k")
    archive = zipped(tmp_path / "100k", site / "ml-100k.zip", "ml-100k/")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(module, "_URL", f"http://127.0.0.1:{server.server_port}/ml-{{variant}}.zip")
    monkeypatch.setattr(module, "_unreachable", _REAL_UNREACHABLE)
    try:
        with pytest.raises(ValueError, match="hash"):
            load_ratings()
        monkeypatch.setitem(module._HASHES, "100k", "md5:" + _md5(archive))
        assert load_ratings().origin.startswith("downloaded from http://127.0.0.1")
        missing = load_ratings(variant="1m")
        assert missing.source.startswith("synthetic")
        assert "404" in missing.origin
    finally:
        server.shutdown()
        server.server_close()
    assert load_ratings().origin == f"cache {nowhere / 'ml-100k.zip'}"
