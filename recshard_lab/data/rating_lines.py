"""Reads ratings at millions of lines per second: regular blocks of a file with numpy, others line by line.

A block is regular if every line has four numbers, the separators, and known stars and ids. Reading line by line finds
the malformed line and its problem, if the block has one.

Shape letters: n ratings.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recshard_lab.data.text_file import Row, TextFile

HEADER = ("userId", "movieId", "rating", "timestamp")
_PLAIN = bytes(range(48, 58)) + b".,\n"
_MOST_DIGITS = 18  # of a number that an int64 holds
_STAR_WIDTH = 3
_ZERO, _COMMA, _NEWLINE = b"0,\n"
_FIELD_ENDS = np.frombuffer(b",,,\n", np.uint8)
Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]
_MOST_ID = 1 << 24  # above, ids are looked up one by one


@dataclass
class RatingColumns:
    """The columns of all lines."""

    user: NDArray[np.int64]  # [n] row of the user
    movie: NDArray[np.int64]  # [n] row of the movie
    rating: NDArray[np.float32]  # [n] stars
    timestamp: NDArray[np.int64]  # [n] seconds since 1970


class RatingLines:
    """Reads a file of (user, movie, rating, timestamp) lines.

    Args:
        file: the ratings.
        separator: "," for a file with a header and quotes, else as it stands, e.g. "::".
        stars: the ratings that may be, as written.
        movies: row of each movie's id; movies_file says where they stand.
        users: row of each user's id, or None to number them as they come; users_file likewise.
    """

    def __init__(
        self,
        file: TextFile,
        separator: str,
        stars: Mapping[str, float],
        movies: Mapping[str, int],
        movies_file: str,
        users: dict[str, int] | None = None,
        users_file: str = "",
    ) -> None:
        self.file, self.separator, self.stars = file, separator, dict(stars)
        self.movies, self.movies_file = dict(movies), movies_file
        self.known_users, self.users_file = users is not None, users_file
        self.users = {} if users is None else users
        self.row_of_movie, self.row_of_user = _rows_by_number(self.movies), _rows_by_number(self.users)

    def read(self) -> RatingColumns:
        """All lines.

        Raises:
            ValueError: an empty file, another header, or a line that is malformed or names an unknown user or movie.
        """
        pieces = []
        for first, piece in self.file.pieces():
            if first == 1 and self.separator == ",":
                head, _, piece = piece.partition(b"\n")
                self._check_header(head)
                first = 2
            if piece:
                pieces.append(self._read_plain(piece) or self._read_lines(first, piece))
        if not pieces:
            raise ValueError(f"{self.file.name} has no ratings")
        columns = (np.concatenate(own) for own in zip(*pieces, strict=True))
        return RatingColumns(*columns)

    def _check_header(self, head: bytes) -> None:
        found = self.file.decode(head.rstrip(b"\r"), 1)
        if next(csv.reader([found]), []) != list(HEADER):
            raise self.file.refusal(1, f"expected the header {','.join(HEADER)}, got {found!r}")

    def _read_plain(self, piece: bytes) -> tuple[NDArray[np.generic], ...] | None:
        """The columns of a piece whose lines are all as they should be; None for any other."""
        text = piece.replace(b"\r\n", b"\n")
        if self.separator != ",":
            if b"," in text:
                return None
            text = text.replace(self.separator.encode(), b",")
        if text.translate(None, _PLAIN):
            return None
        bytes_ = np.frombuffer(text, np.uint8)
        found = _fields(bytes_)
        if found is None:
            return None
        begins, widths = found
        user, movie, timestamp = (_whole_numbers(bytes_, begins[:, at], widths[:, at]) for at in (0, 1, 3))
        rating = self._stars(bytes_, begins[:, 2], widths[:, 2])
        if user is None or movie is None or timestamp is None or rating is None:
            return None
        movie_row = _looked_up(self.row_of_movie, movie)
        if movie_row is None:
            return None
        if not self.known_users:
            self._number_users(user)
        user_row = _looked_up(self.row_of_user, user)
        return None if user_row is None else (user_row, movie_row, rating, timestamp)

    def _stars(self, bytes_: Bytes, begins: Positions, widths: Positions) -> NDArray[np.float32] | None:
        """Ratings, compared as they are written; None if one may not be."""
        if widths.max() > _STAR_WIDTH:
            return None
        written = np.zeros(len(begins), np.int64)
        for place in range(_STAR_WIDTH):
            written = written * 256 + np.where(place < widths, bytes_[np.minimum(begins + place, len(bytes_) - 1)], 0)
        known = {
            int.from_bytes(text.encode().ljust(_STAR_WIDTH, b"\0"), "big"): own for text, own in self.stars.items()
        }
        codes = np.array(sorted(known))
        at = np.minimum(np.searchsorted(codes, written), len(codes) - 1)
        if not np.array_equal(codes[at], written):
            return None
        return np.array([known[code] for code in sorted(known)], np.float32)[at]

    def _number_users(self, users: NDArray[np.int64]) -> None:
        """Gives users that are new the next rows, in the order in which they come."""
        if not len(users) or users.max() >= _MOST_ID:
            return
        short = int(users.max()) + 1 - len(self.row_of_user)
        if short > 0:
            self.row_of_user = np.append(self.row_of_user, np.full(short, -1))
        found, first = np.unique(users, return_index=True)
        for user in found[np.argsort(first)]:
            if self.row_of_user[user] < 0:
                self.row_of_user[user] = self.users.setdefault(str(user), len(self.users))

    def _read_lines(self, first: int, piece: bytes) -> tuple[NDArray[np.generic], ...]:
        """A piece line by line."""
        users, movies, ratings, timestamps = [], [], [], []
        for line, (user, movie, rating, timestamp) in self._rows(first, piece):
            if not self.known_users:
                self.users.setdefault(user, len(self.users))
            users.append(self.file.known(line, "user", user, self.users, self.users_file))
            movies.append(self.file.known(line, "movie", movie, self.movies, self.movies_file))
            ratings.append(self.file.stars(line, rating, self.stars))
            timestamps.append(self.file.integer(line, "timestamp", timestamp))
        self.row_of_user = _rows_by_number(self.users)
        return (
            np.array(users, np.int64),
            np.array(movies, np.int64),
            np.array(ratings, np.float32),
            np.array(timestamps, np.int64),
        )

    def _rows(self, first: int, piece: bytes) -> Iterator[Row]:
        text = self.file.decode(piece, first)
        if self.separator != ",":
            yield from self.file.rows_of(text, first, self.separator, 4)
            return
        reader = csv.reader(io.StringIO(text), strict=True)
        try:
            for row in reader:
                line = first + reader.line_num - 1
                if len(row) != 4:
                    raise self.file.refusal(line, f"expected 4 fields, got {len(row)}: {row!r}")
                yield line, row
        except csv.Error as error:
            raise self.file.refusal(first + reader.line_num - 1, str(error)) from None


def _fields(bytes_: Bytes) -> tuple[Positions, Positions] | None:
    """Where the four fields of every line begin and how wide they are, ``[n, 4]``; None if a line has others."""
    ends = np.flatnonzero((bytes_ == _COMMA) | (bytes_ == _NEWLINE))
    if len(ends) % 4 or (bytes_[ends].reshape(-1, 4) != _FIELD_ENDS).any():
        return None
    begins = np.append(-1, ends[:-1]) + 1
    widths = ends - begins
    if widths.min() < 1 or widths.max() > _MOST_DIGITS:
        return None
    return begins.reshape(-1, 4), widths.reshape(-1, 4)


def _whole_numbers(bytes_: Bytes, begins: Positions, widths: Positions) -> NDArray[np.int64] | None:
    """Fields as numbers; None if one is not written plainly: with a dot, or a zero before it (01 is not 1)."""
    if ((bytes_[begins] == _ZERO) & (widths > 1)).any():
        return None
    numbers = np.zeros(len(begins), np.int64)
    for place in range(int(widths.max())):
        digits = bytes_[np.minimum(begins + place, len(bytes_) - 1)].astype(np.int64) - _ZERO
        inside = place < widths
        if (digits[inside] < 0).any():
            return None
        numbers = np.where(inside, numbers * 10 + digits, numbers)
    return numbers


def _rows_by_number(rows: Mapping[str, int]) -> NDArray[np.int64]:
    """Row of each id that is a number written plainly, -1 for others."""
    numbers = {int(own): row for own, row in rows.items() if own.isascii() and own.isdigit() and str(int(own)) == own}
    numbers = {number: row for number, row in numbers.items() if number < _MOST_ID}
    table = np.full(max(numbers, default=-1) + 1, -1, np.int64)
    if numbers:
        table[np.fromiter(numbers, np.int64)] = np.fromiter(numbers.values(), np.int64)
    return table


def _looked_up(table: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The ids' rows; None if one has none."""
    if len(ids) and ids.max() >= len(table):
        return None
    found = table[ids]
    return None if len(found) and found.min() < 0 else found
