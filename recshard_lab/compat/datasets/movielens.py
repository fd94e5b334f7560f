"""``torchrec.datasets.movielens``: the ratings of MovieLens 20M and 25M, line by line.

`recshard_lab.MovieLens` reads the same data sets for training.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import IterDataPipe

from recshard_lab.compat.datasets.pipes import LoadFiles, Mapper, ReadLinesFromCSV, RowMapper, safe_cast

# source: https://files.grouplens.org/datasets/movielens/ml-25m-README.html
RATINGS_FILENAME = "ratings.csv"
MOVIES_FILENAME = "movies.csv"
DEFAULT_RATINGS_COLUMN_NAMES = ["userId", "movieId", "rating", "timestamp"]
DEFAULT_MOVIES_COLUMN_NAMES = ["movieId", "title", "genres"]
DEFAULT_COLUMN_NAMES = DEFAULT_RATINGS_COLUMN_NAMES + DEFAULT_MOVIES_COLUMN_NAMES[1:]


_INTEGER, _NUMBER, _TEXT = (partial(safe_cast, dest_type=kind, default=kind()) for kind in (int, float, str))
COLUMN_TYPE_CASTERS: list[Callable[[str], Any]] = [_INTEGER, _INTEGER, _NUMBER, _INTEGER, _TEXT, _TEXT]
"""Text -> value for each of `DEFAULT_COLUMN_NAMES`. Text without a value becomes 0."""


def _named(columns: list[str]) -> dict[str, Any]:
    """Column name -> value, for as many columns as the line has."""
    return {
        name: cast(text) for name, cast, text in zip(DEFAULT_COLUMN_NAMES, COLUMN_TYPE_CASTERS, columns, strict=False)
    }


def _lines(path: str, open_kw: dict[str, Any]) -> IterDataPipe[list[str]]:
    return ReadLinesFromCSV(LoadFiles([path], mode="r", **open_kw), skip_first_line=True, delimiter=",")


def _joined(movies: dict[str, list[str]], columns: list[str]) -> list[str]:
    return columns + movies[columns[1]]


def _ratings(root: str, include_movies_data: bool, row_mapper: RowMapper, open_kw: dict[str, Any]) -> IterDataPipe[Any]:
    pipe: IterDataPipe[Any] = _lines(os.path.join(root, RATINGS_FILENAME), open_kw)
    if include_movies_data:
        movies = {movie: [title, genres] for movie, title, genres in _lines(os.path.join(root, MOVIES_FILENAME), {})}
        pipe = Mapper(pipe, partial(_joined, movies))
    return Mapper(pipe, row_mapper) if row_mapper else pipe


def movielens_20m(
    root: str, *, include_movies_data: bool = False, row_mapper: RowMapper = _named, **open_kw: Any
) -> IterDataPipe[Any]:
    """The ratings of MovieLens 20M, line by line.

    Args:
        root: the folder with ``ratings.csv``.
        include_movies_data: whether to add title and genres from ``movies.csv`` to each rating.
        row_mapper: called with the columns of a line, list of str. Default: a dict of named values. None: no call.
        open_kw: arguments of `open` for the ratings.

    Raises:
        KeyError: a rating of a movie that ``movies.csv`` lacks, with `include_movies_data`.
    """
    return _ratings(root, include_movies_data, row_mapper, open_kw)


def movielens_25m(
    root: str, *, include_movies_data: bool = False, row_mapper: RowMapper = _named, **open_kw: Any
) -> IterDataPipe[Any]:
    """The ratings of MovieLens 25M, line by line. Arguments and errors are those of `movielens_20m`."""
    return _ratings(root, include_movies_data, row_mapper, open_kw)
