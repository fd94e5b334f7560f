"""The published MovieLens files, read strictly: a line that does not parse is refused by file and number.

Five layouts are known by the names of their files (`FORMATS`), in a folder, a zip or a wheel:

    100k          u.data, u.user, u.item                  tab and pipe separated, latin-1, 19 genre flags
    1m            ratings.dat, users.dat, movies.dat      '::' separated, latin-1, genres joined by '|'
    10m           ratings.dat, movies.dat                 '::' separated, UTF-8, half stars, no user profiles
    20m 25m 32m   ratings.csv, movies.csv                 commas, UTF-8, half stars, no user profiles
    latest-small  the same
    100k          ml-100k.inter, .user, .item             as the recbole package carries it: tabs, typed headers

Shape letters: n ratings, U users, M movies.
"""

import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from recshard_lab.data.rating_lines import RatingColumns, RatingLines
from recshard_lab.data.text_file import Row, TextFile

AGE_BANDS = ("under 18", "18-24", "25-34", "35-44", "45-49", "50-55", "56+")
_BAND_STARTS = (18, 25, 35, 45, 50, 56)
_GENDERS = ("F", "M")
# fmt: off
_GENRES_100K = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama",
    "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)
_OCCUPATIONS_1M = (
    "other", "academic/educator", "artist", "clerical/admin", "college/grad student", "customer service",
    "doctor/health care", "executive/managerial", "farmer", "homemaker", "K-12 student", "lawyer", "programmer",
    "retired", "sales/marketing", "scientist", "self-employed", "technician/engineer", "tradesman/craftsman",
    "unemployed", "writer",
)
# fmt: on
_SEARCH_DEPTH = 3  # folders below the given one that are looked into


@dataclass(frozen=True)
class RawRatings:
    """What every release boils down to: row numbers instead of the files' own ids."""

    ratings: RatingColumns
    profiles: dict[str, list[int]]  # age, gender, occupation: one id a user [U]; empty when not published
    genres: list[list[int]]  # [M] the genres of each movie, possibly none
    names: dict[str, tuple[str, ...]]  # the meaning of each id of a feature


_WHOLE_STARS = {str(stars): float(stars) for stars in range(1, 6)}
_HALF_STARS = {str(halves / 2): halves / 2 for halves in range(1, 11)}
_SHORT_HALF_STARS = {f"{halves / 2:g}": halves / 2 for halves in range(1, 11)}  # 4 and 4.5
_NO_GENRE = "(no genres listed)"


def age_band(age: int) -> int:
    """Which of `AGE_BANDS` an age in years falls into (the bands of MovieLens 1M).

    >>> AGE_BANDS[age_band(24)]
    '18-24'
    """
    return sum(age >= start for start in _BAND_STARTS)


class _Profiles:
    """Collects users: their rows and what is known of them."""

    def __init__(self, file: TextFile) -> None:
        self.file = file
        self.row: dict[str, int] = {}
        self.ages: list[int] = []
        self.genders: list[int] = []
        self.occupations: list[str] = []

    def add(self, line: int, user: str, age: str, gender: str, occupation: str) -> None:
        if user in self.row:
            raise self.file.refusal(line, f"user {user!r} appears a second time")
        if gender not in _GENDERS:
            raise self.file.refusal(line, f"gender must be M or F, got {gender!r}")
        if not occupation:
            raise self.file.refusal(line, "occupation is empty")
        self.row[user] = len(self.row)
        self.ages.append(age_band(self.file.integer(line, "age", age)))
        self.genders.append(_GENDERS.index(gender))
        self.occupations.append(occupation)

    def features(self) -> dict[str, list[int]]:
        vocabulary = {name: row for row, name in enumerate(self.occupation_names())}
        occupation = [vocabulary[name] for name in self.occupations]
        return {"age": self.ages, "gender": self.genders, "occupation": occupation}

    def occupation_names(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.occupations)))


class _Movies:
    """Collects movies: their rows, titles and genres."""

    def __init__(self, file: TextFile, genre_names: Sequence[str] | None) -> None:
        self.file = file
        self.row: dict[str, int] = {}
        self.titles: list[str] = []
        self.genre_words: list[list[str]] = []
        self.fixed_names = genre_names

    def add(self, line: int, movie: str, title: str, genres: list[str]) -> None:
        if movie in self.row:
            raise self.file.refusal(line, f"movie {movie!r} appears a second time")
        if self.fixed_names is not None:
            for genre in genres:
                if genre not in self.fixed_names:
                    raise self.file.refusal(line, f"{genre!r} is not a genre of MovieLens 100K")
        self.row[movie] = len(self.row)
        self.titles.append(title)
        self.genre_words.append(genres)

    def genre_names(self) -> tuple[str, ...]:
        if self.fixed_names is not None:
            return tuple(self.fixed_names)
        return tuple(sorted({genre for genres in self.genre_words for genre in genres}))

    def genres(self) -> list[list[int]]:
        row = {name: number for number, name in enumerate(self.genre_names())}
        return [[row[genre] for genre in genres] for genres in self.genre_words]


def _raw(columns: RatingColumns, movies: _Movies, users: dict[str, int], profiles: _Profiles | None) -> RawRatings:
    raw = RawRatings(columns, profiles.features() if profiles else {}, movies.genres(), {})
    raw.names.update(user=tuple(users), movie=tuple(movies.titles), genres=movies.genre_names())
    if profiles:
        raw.names.update(age=AGE_BANDS, gender=_GENDERS, occupation=profiles.occupation_names())
    return raw


def _join(file: TextFile, rows: Iterator[Row], movies: _Movies, profiles: _Profiles) -> RawRatings:
    """Reads (user, movie, rating, timestamp) rows against the users and movies already read."""
    found = []
    for line, (user, movie, rating, timestamp) in rows:
        row = file.known(line, "user", user, profiles.row, profiles.file.name)
        column = file.known(line, "movie", movie, movies.row, movies.file.name)
        found.append((row, column, file.stars(line, rating, _WHOLE_STARS), file.integer(line, "timestamp", timestamp)))
    users, movie_rows, stars, times = zip(*found, strict=True) if found else ((), (), (), ())
    columns = RatingColumns(
        np.array(users, np.int64),
        np.array(movie_rows, np.int64),
        np.array(stars, np.float32),
        np.array(times, np.int64),
    )
    return _raw(columns, movies, profiles.row, profiles)


def _movies_of(rows: Iterator[Row], file: TextFile) -> _Movies:
    movies = _Movies(file, None)
    for line, (movie_id, title, genres) in rows:
        movies.add(line, movie_id, title, [] if genres in ("", _NO_GENRE) else genres.split("|"))
    return movies


def _read_100k(files: list[TextFile]) -> RawRatings:
    data, user, item = files
    profiles = _Profiles(user)
    for line, (user_id, age, gender, occupation, _zip) in user.rows("|", 5):
        profiles.add(line, user_id, age, gender, occupation)
    movies = _Movies(item, _GENRES_100K)
    for line, parts in item.rows("|", 5 + len(_GENRES_100K)):
        flags = parts[5:]
        if any(flag not in ("0", "1") for flag in flags):
            raise item.refusal(line, f"genre flags must be 0 or 1, got {'|'.join(flags)!r}")
        genres = [genre for genre, flag in zip(_GENRES_100K, flags, strict=True) if flag == "1"]
        movies.add(line, parts[0], parts[1], genres)
    return _join(data, data.rows("\t", 4), movies, profiles)


def _read_1m(files: list[TextFile]) -> RawRatings:
    ratings, user, item = files
    profiles = _Profiles(user)
    for line, (user_id, gender, age, occupation, _zip) in user.rows("::", 5):
        code = user.integer(line, "occupation", occupation)
        if not 0 <= code < len(_OCCUPATIONS_1M):
            raise user.refusal(line, f"occupation must be 0 to {len(_OCCUPATIONS_1M) - 1}, got {code}")
        profiles.add(line, user_id, age, gender, _OCCUPATIONS_1M[code])
    movies = _movies_of(item.rows("::", 3), item)
    lines = RatingLines(ratings, "::", _WHOLE_STARS, movies.row, item.name, profiles.row, user.name)
    return _raw(lines.read(), movies, profiles.row, profiles)


def _read_10m(files: list[TextFile]) -> RawRatings:
    ratings, item = files
    movies = _movies_of(item.rows("::", 3), item)
    lines = RatingLines(ratings, "::", _HALF_STARS | _SHORT_HALF_STARS, movies.row, item.name)
    return _raw(lines.read(), movies, lines.users, None)


def _read_csv(files: list[TextFile]) -> RawRatings:
    ratings, item = files
    movies = _movies_of(item.csv_rows(("movieId", "title", "genres")), item)
    lines = RatingLines(ratings, ",", _HALF_STARS, movies.row, item.name)
    return _raw(lines.read(), movies, lines.users, None)


def _read_recbole(files: list[TextFile]) -> RawRatings:
    inter, user, item = files
    profiles = _Profiles(user)
    for line, parts in user.typed_rows(("user_id", "age", "gender", "occupation")):
        profiles.add(line, *parts)
    movies = _Movies(item, _GENRES_100K)
    for line, (movie_id, title, year, genres) in item.typed_rows(("item_id", "movie_title", "release_year", "class")):
        movies.add(line, movie_id, f"{title} ({year})" if year else title, genres.split())
    rows = inter.typed_rows(("user_id", "item_id", "rating", "timestamp"))
    return _join(inter, rows, movies, profiles)


@dataclass(frozen=True)
class Format:
    """One published layout: the releases that have it, the names it is known by and the function that reads it."""

    variants: tuple[str, ...]
    file_names: tuple[str, ...]
    encoding: str
    read: Callable[[list[TextFile]], RawRatings]


_CSV = ("latest-small", "20m", "25m", "32m")
FORMATS = (
    Format(("100k",), ("u.data", "u.user", "u.item"), "latin-1", _read_100k),
    Format(("1m",), ("ratings.dat", "users.dat", "movies.dat"), "latin-1", _read_1m),
    Format(("10m",), ("ratings.dat", "movies.dat"), "utf-8", _read_10m),
    Format(_CSV, ("ratings.csv", "movies.csv"), "utf-8", _read_csv),
    Format(("100k",), ("ml-100k.inter", "ml-100k.user", "ml-100k.item"), "utf-8", _read_recbole),
)
# number of ratings of each release of one layout
_PUBLISHED = {100_836: "latest-small", 20_000_263: "20m", 25_000_095: "25m", 32_000_204: "32m"}


def _release(layout: Format, raw: RawRatings, variant: str | None, root: Path) -> str:
    """Which release it is, as figures name it."""
    if len(layout.variants) == 1:
        found = layout.variants[0]
    else:
        size = len(raw.ratings.rating)
        found = _PUBLISHED.get(size, variant or "")
        if variant is not None and found != variant:
            raise ValueError(f"{root} holds MovieLens {found} ({size:,} ratings), not variant {variant!r}")
    return f"MovieLens {found.upper() if found[:1].isdigit() else found}" if found else "MovieLens of another release"


def read_ratings(path: str | os.PathLike[str], variant: str | None = None) -> tuple[str, RawRatings]:
    """Reads a release from a folder, zip or wheel, whichever layout its file names show; its name comes first.

    Args:
        path: the folder (looked into three levels deep) or archive.
        variant: the release to read; needed only if the folder has several.

    Raises:
        FileNotFoundError: nothing at that path.
        ValueError: no known layout, several without `variant`, another than `variant`, or a malformed line.
    """
    root = Path(path).expanduser()
    if not root.exists():
        raise FileNotFoundError(f"no MovieLens files at {root}: the path does not exist")
    if root.is_dir():
        return _read_from(root, _walk(root), lambda member: (root / member).open("rb"), variant)
    if not zipfile.is_zipfile(root):
        raise ValueError(f"{root} is neither a folder nor a zip or wheel: give the place of the files")
    with zipfile.ZipFile(root) as archive:
        return _read_from(root, archive.namelist(), lambda member: archive.open(member), variant)  # type: ignore[arg-type,return-value]


def _walk(root: Path) -> list[str]:
    found: list[str] = []
    for folder, subfolders, names in os.walk(root):
        below = Path(folder).relative_to(root)
        if len(below.parts) >= _SEARCH_DEPTH:
            subfolders.clear()
        found += [(below / name).as_posix() for name in names]
    return found


def _read_from(
    root: Path, members: list[str], open_file: Callable[[str], BinaryIO], variant: str | None
) -> tuple[str, RawRatings]:
    there = set(members)
    folders = sorted({member.rpartition("/")[0] for member in members})
    found = [
        (layout, [f"{folder}/{name}" if folder else name for name in layout.file_names])
        for layout in FORMATS
        for folder in folders
        if all((f"{folder}/{name}" if folder else name) in there for name in layout.file_names)
    ]
    # a folder of 1M has the files of 10M's names, and one more
    whole = [names for layout, names in found if layout.variants == ("1m",)]
    found = [
        each for each in found if each[0].variants != ("10m",) or [each[1][0]] not in [names[:1] for names in whole]
    ]
    chosen = [each for each in found if variant is None or variant in each[0].variants]
    if not found:
        known = "; ".join(f"{' '.join(layout.variants)}: {', '.join(layout.file_names)}" for layout in FORMATS)
        raise ValueError(f"no MovieLens files in {root}. Expected side by side one of: {known}")
    if not chosen:
        raise ValueError(f"{root} holds MovieLens {' or '.join(found[0][0].variants)}, not variant {variant!r}")
    if len(chosen) > 1:
        places = ", ".join(names[0] for _, names in chosen)
        raise ValueError(f"{root} holds several MovieLens releases ({places}): give the folder of one")
    layout, names = chosen[0]
    files = [TextFile(f"{root}/{name}", partial(open_file, name), layout.encoding) for name in names]
    raw = layout.read(files)
    return _release(layout, raw, variant, root), raw
