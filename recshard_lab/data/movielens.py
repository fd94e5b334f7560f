"""MovieLens: found on disk, in the cache or on the network, and turned into samples of (features, click).

The data belong to GroupLens (https://grouplens.org/datasets/movielens/) and are not part of this library.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import torch

from recshard_lab.data.formats import RawRatings, read_ratings
from recshard_lab.data.ratings import Column, RatingsDataset
from recshard_lab.data.synthetic import SyntheticRatings
from recshard_lab.sparse import JaggedTensor, gather_segments

PATH_VARIABLE = "RECSHARD_MOVIELENS"
CLICK_STARS = 4.0
_URL = "https://files.grouplens.org/datasets/movielens/ml-{variant}.zip"
# GroupLens publishes the MD5 of the numbered releases beside the files. latest-small may change under its name: this is
# the release of September 2018 (100,836 ratings), and any other is refused rather than trained on unknowingly.
_HASHES = {
    "100k": "md5:0e33842e24a9c977be4e0107933c0723",
    "1m": "md5:c4d9eecfca2ab87c1945afe126590906",
    "10m": "md5:ce571fd55effeba0271552578f2648bd",
    "20m": "md5:cd245b17a1ae2cc31bb14903e1204af3",
    "25m": "md5:6b51fb2759a8657d3bfcbfc42b592ada",
    "32m": "md5:d472be332d4daa821edc399621853b57",
    "latest-small": "sha256:696d65a3dfceac7c45750ad32df2c259311949efec81f0f144fdfb91ebc9e436",
}
_ANSWER_SECONDS = 4.0

Place = str | os.PathLike[str]


class MovieLensNotFoundError(FileNotFoundError):
    """No MovieLens files at any of the places looked at; the message lists them."""


class MovieLens:
    """The MovieLens ratings; `MovieLens.load` gives a `RatingsDataset`."""

    @staticmethod
    def load(path: Place | None = None, variant: str | None = None, download: bool = True) -> RatingsDataset:
        """Reads MovieLens from the first of: `path`, ``$RECSHARD_MOVIELENS``, pooch's cache, the network.

        A click is a rating of 4 stars or more. Features: ``user``, ``movie``, ``age`` (7 bands), ``gender``,
        ``occupation`` and multi-hot ``genres``; 10M and all after it publish no user profiles, so they have
        ``user``, ``movie`` and ``genres``. The dataset's `source` names the release, its `origin` the place.

        Args:
            path: a folder, zip or wheel with the files of one release, or of the recbole package's copy.
            variant: "100k", "1m", "10m", "20m", "25m", "32m" or "latest-small"; the one to fetch
                ("100k" when left out), and the one that a given path must hold.
            download: whether the network may be asked.

        Raises:
            MovieLensNotFoundError: nowhere to be found; it lists where it looked.
            FileNotFoundError: nothing at `path` or at the variable's path.
            ValueError: an unknown variant, an unknown layout, a malformed line (by file and number), or a
                downloaded file whose hash is not the known one.
        """
        if variant is not None and variant not in _HASHES:
            raise ValueError(f"variant must be one of {', '.join(_HASHES)}, got {variant!r}")
        if path is not None:
            return _dataset(*read_ratings(path, variant), origin=f"path {path}")
        named = os.environ.get(PATH_VARIABLE)
        if named:
            return _dataset(*read_ratings(named, variant), origin=f"${PATH_VARIABLE}={named}")
        variant = variant or "100k"
        archive, origin = _fetch(variant, download)
        return _dataset(*read_ratings(archive, variant), origin=origin)


def load_ratings(
    path: Place | None = None, variant: str | None = None, download: bool = True, seed: int = 0
) -> RatingsDataset:
    """MovieLens from a path, the variable, the cache or the network; synthetic ratings where there is none.

    The dataset's `source` names the data, for every figure. Its `origin` is the place where it was found or, for
    synthetic ratings, the places that were searched.

    Args:
        path, variant, download: as for `MovieLens.load`. A path (here or in the variable) must have readable
            files: synthetic ratings never replace a wrong path or a malformed file.
        seed: of the synthetic ratings.
    """
    try:
        return MovieLens.load(path, variant, download)
    except MovieLensNotFoundError as error:
        dataset = SyntheticRatings(seed=seed, why="no MovieLens file found")
        dataset.origin = f"the shipped generator, seed {seed}: {error}"
        return dataset


def cache_folder() -> Path:
    """Where downloads are kept between sessions."""
    import pooch

    return Path(pooch.os_cache("recshard_lab"))


def _fetch(variant: str, download: bool) -> tuple[Path, str]:
    """The release's zip from the cache or the network, its hash checked either way, and where it was."""
    name = f"ml-{variant}.zip"
    cached = cache_folder() / name
    tried = [f"no path given, ${PATH_VARIABLE} not set, nothing at {cached}"]
    if cached.exists():
        _check_hash(cached, variant)
        return cached, f"cache {cached}"
    if not download:
        raise MovieLensNotFoundError(f"{tried[0]}, download=False")
    url = _URL.format(variant=variant)
    failure = _unreachable(url)
    if failure is None:
        failure = _download(url, variant, cached)
    if failure is None:
        return cached, f"downloaded from {url}"
    raise MovieLensNotFoundError(f"{tried[0]}, and {url} cannot be had ({failure})")


def _check_hash(archive: Path, variant: str) -> None:
    import pooch

    algorithm, _, known = _HASHES[variant].partition(":")
    found = pooch.file_hash(str(archive), alg=algorithm)
    if found != known:
        raise ValueError(
            f"{archive} has {algorithm} {found}, expected {known}: delete it to fetch it again, "
            f"or give it as path= to use it as it is"
        )


def _unreachable(url: str) -> str | None:
    """Why the server cannot be reached, or None if it answers; decided within seconds.

    Runs in a thread, because a name lookup without a network has no time limit.
    """
    import requests

    answer = [f"no answer within {_ANSWER_SECONDS:g} s"]

    def ask() -> None:
        try:
            requests.head(url, timeout=_ANSWER_SECONDS, allow_redirects=True).raise_for_status()
        except requests.RequestException as error:
            answer[0] = _reason(error)
        else:
            answer.clear()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_ANSWER_SECONDS)
    return answer[0] if answer else None


def _download(url: str, variant: str, target: Path) -> str | None:
    """Fetches into the cache; the reason where the network fails midway."""
    import pooch

    pooch.get_logger().setLevel(logging.WARNING)
    try:
        pooch.retrieve(
            url,
            known_hash=_HASHES[variant],
            fname=target.name,
            path=target.parent,
            downloader=pooch.HTTPDownloader(timeout=_ANSWER_SECONDS),
        )
    except OSError as error:  # the network's errors and the disk's
        return _reason(error)
    return None


def _reason(error: OSError) -> str:
    """One short clause: requests' connection errors nest several messages, HTTP and disk errors say it in one."""
    import requests

    nested = isinstance(error, requests.RequestException) and not isinstance(error, requests.HTTPError)
    return type(error).__name__ if nested else str(error)


def _dataset(release: str, raw: RawRatings, origin: str) -> RatingsDataset:
    """Joins users' profiles and movies' genres to their ratings."""
    user, movie = torch.from_numpy(raw.ratings.user), torch.from_numpy(raw.ratings.movie)
    columns: dict[str, Column] = {"user": user, "movie": movie}
    for name, ids in raw.profiles.items():
        columns[name] = torch.tensor(ids)[user]
    genres = _bags(raw.genres)
    values, lengths, _ = gather_segments(genres.values(), genres.lengths(), movie)
    columns["genres"] = JaggedTensor(values, lengths=lengths)
    return RatingsDataset(
        columns,
        {name: len(raw.names[name]) for name in columns},
        torch.from_numpy(raw.ratings.rating) >= CLICK_STARS,
        source=f"{release}, {len(user):,} ratings",
        origin=origin,
        timestamps=torch.from_numpy(raw.ratings.timestamp),
        names=raw.names,
    )


def _bags(bags: list[list[int]]) -> JaggedTensor:
    return JaggedTensor(
        torch.tensor([identifier for bag in bags for identifier in bag], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int32),
    )
