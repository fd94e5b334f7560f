"""Datasets by name, for configs: ``{"name": "criteo", "path": ...}`` becomes samples to train on and to test on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recshard_lab.data.click_files import CriteoClicks
from recshard_lab.data.clicks import SyntheticClicks
from recshard_lab.data.movielens import MovieLens
from recshard_lab.data.ratings import RatingsDataset
from recshard_lab.data.source import SamplePart, SampleSource
from recshard_lab.data.synthetic import SyntheticRatings


@dataclass(frozen=True)
class Splits:
    """Samples to train on and others to test on, with the same features."""

    train: SampleSource
    test: SampleSource


_BUILDERS: dict[str, Callable[..., Splits]] = {}


def register_dataset(name: str) -> Callable[[Callable[..., Splits]], Callable[..., Splits]]:
    """Decorator: a function of keyword arguments that returns `Splits` becomes a dataset that configs may name.

    >>> @register_dataset("two-clicks")
    ... def two_clicks(rows: int = 5) -> Splits:
    ...     data = SyntheticClicks(2, rows=[rows])
    ...     return Splits(data, data)
    >>> build_dataset({"name": "two-clicks", "rows": 7}).train.features
    {'cat_0': 7}
    >>> del _BUILDERS["two-clicks"]
    """

    def keep(builder: Callable[..., Splits]) -> Callable[..., Splits]:
        _BUILDERS[name] = builder
        return builder

    return keep


def dataset_names() -> list[str]:
    """The names that `build_dataset` knows.

    >>> dataset_names()
    ['criteo', 'movielens', 'synthetic-criteo', 'synthetic-ratings']
    """
    return sorted(_BUILDERS)


def build_dataset(config: Mapping[str, Any]) -> Splits:
    """The dataset of a config: its `name` and the settings of its builder.

    Raises:
        ValueError: no or an unknown name, a setting that it does not have or lacks, or a wrong one.

    >>> build_dataset({"name": "synthetic-ratings", "color": "red"})
    Traceback (most recent call last):
    ...
    ValueError: dataset 'synthetic-ratings' has no setting 'color'; it has: num_ratings, seed, split, test_fraction
    """
    if not isinstance(config, Mapping) or not isinstance(config.get("name"), str):
        raise ValueError(f"config must be a mapping with a name, one of {', '.join(dataset_names())}; got {config!r}")
    settings = dict(config)
    name = settings.pop("name")
    if name not in _BUILDERS:
        raise ValueError(f"no dataset is named {name!r}; there are: {', '.join(dataset_names())}")
    known = inspect.signature(_BUILDERS[name]).parameters
    for setting in settings:
        if setting not in known:
            has = ", ".join(sorted(known))
            raise ValueError(f"dataset {name!r} has no setting {setting!r}; it has: {has}")
    for setting, parameter in known.items():
        if parameter.default is parameter.empty and setting not in settings:
            raise ValueError(f"dataset {name!r} needs the setting {setting!r}")
    return _BUILDERS[name](**settings)


def _split(data: RatingsDataset, split: str, test_fraction: float, seed: int) -> Splits:
    return Splits(*data.split(split, test_fraction, seed))


@register_dataset("movielens")
def movielens(
    path: str | None = None,
    variant: str | None = None,
    download: bool = True,
    split: str = "random",
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Splits:
    """`MovieLens.load`, split at random or by time."""
    return _split(MovieLens.load(path, variant, download), split, test_fraction, seed)


@register_dataset("synthetic-ratings")
def synthetic_ratings(
    num_ratings: int = 100_000, split: str = "random", test_fraction: float = 0.2, seed: int = 0
) -> Splits:
    """`SyntheticRatings` of MovieLens 100K's sizes, split at random or by time."""
    return _split(SyntheticRatings(num_ratings, seed=seed), split, test_fraction, seed)


@register_dataset("synthetic-criteo")
def synthetic_criteo(
    num_samples: int = 1 << 20,
    test_samples: int = 1 << 16,
    rows: list[int] | None = None,
    memory_bytes: int = 1 << 26,
    num_dense: int = 13,
    zipf: float = 1.05,
    signal: float = 1.5,
    click_rate: float = 0.25,
    seed: int = 0,
) -> Splits:
    """`SyntheticClicks`; the test samples are further ones of the same planted model."""
    if not isinstance(num_samples, int) or not isinstance(test_samples, int) or min(num_samples, test_samples) < 0:
        raise ValueError(f"num_samples and test_samples must be from 0, got {num_samples!r} and {test_samples!r}")
    data = SyntheticClicks(
        num_samples + test_samples,
        rows,
        memory_bytes=memory_bytes,
        num_dense=num_dense,
        zipf=zipf,
        signal=signal,
        click_rate=click_rate,
        seed=seed,
    )
    return Splits(SamplePart(data, 0, num_samples), SamplePart(data, num_samples, len(data)))


@register_dataset("criteo")
def criteo(path: str, test: str = "test", in_memory: bool = False, test_fraction: float = 0.1) -> Splits:
    """A folder that ``recshard data criteo`` made: all days but the last, and a half of the last.

    Args:
        path: the folder.
        test: "test", the second half of the last day, or "val", the first. A single day has no last: then the latest
            `test_fraction` of its samples.
        in_memory: read everything into memory at once.
    """
    if test not in ("test", "val"):
        raise ValueError(f"test must be 'test' or 'val', got {test!r}")
    data = CriteoClicks.open(path, in_memory=in_memory)
    if len(data.days) > 1:
        return Splits(data.stage("train"), data.stage(test))
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must be between 0 and 1, got {test_fraction!r}")
    cut = len(data) - round(len(data) * test_fraction)
    return Splits(SamplePart(data, 0, cut), SamplePart(data, cut, len(data)))
