"""Tables for a data set: one per feature, with the settings of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from recshard_lab.embedding import DataType, EmbeddingBagConfig, PoolingType
from recshard_lab.models import model_named, settings_of
from recshard_lab.sharding.plan.types import nearest

TABLE_SETTINGS = ("embedding_dim", "pooling", "init_max", "data_type", "tables")
_OF_A_TABLE = ("num_embeddings", "embedding_dim", "data_type", "pooling", "init_max")


def check_settings(name: str, settings: Mapping[str, Any]) -> None:
    """Checks that the model or its tables have these settings.

    Raises:
        ValueError: an unknown setting, with the nearest name.

    >>> check_settings("dlrm", {"embeding_dim": 8})
    Traceback (most recent call last):
    ...
    ValueError: model 'dlrm' has no setting 'embeding_dim' (did you mean 'embedding_dim'?); it has: embedding_dim, ...
    """
    known = [*TABLE_SETTINGS, *(each.name for each in fields(model_named(name).settings))]
    for setting in settings:
        if setting not in known:
            near = nearest(setting, known)
            raise ValueError(f"model {name!r} has no setting {setting!r}{near}; it has: {', '.join(known)}")
    settings_of(name, of_the_model(settings))


def of_the_model(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the model itself."""
    return {key: value for key, value in settings.items() if key not in TABLE_SETTINGS}


def tables_for(
    features: Mapping[str, int],
    embedding_dim: int = 16,
    *,
    pooling: str = "mean",
    init_max: float | None = None,
    data_type: str = "fp32",
    tables: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[EmbeddingBagConfig]:
    """One table per feature, named after it.

    Args:
        features: feature -> its number of ids.
        embedding_dim, pooling, init_max, data_type: of every table; rows start uniform in (-init_max, init_max).
        tables: feature -> settings that differ for its table.

    Raises:
        ValueError: a feature that the data do not have, or a setting that a table does not have.

    >>> tables_for({"movie": 9, "user": 5}, 8, tables={"user": {"num_embeddings": 20}})[1].num_embeddings
    20
    """
    for name, own in (tables or {}).items():
        if name not in features:
            raise ValueError(
                f"tables: the data have no feature {name!r}{nearest(name, features)}; features: {', '.join(features)}"
            )
        for setting in own if isinstance(own, Mapping) else ["?"]:
            if setting not in _OF_A_TABLE:
                raise ValueError(
                    f"tables: {name!r} has no setting {setting!r}{nearest(setting, _OF_A_TABLE)}; a table has: "
                    f"{', '.join(_OF_A_TABLE)}"
                )
    configs = []
    for name, rows in features.items():
        said: dict[str, Any] = {"pooling": pooling, "init_max": init_max, "data_type": data_type}
        said |= {"num_embeddings": rows, "embedding_dim": embedding_dim, **(tables or {}).get(name, {})}
        if said["num_embeddings"] < rows:
            raise ValueError(f"tables: {name!r} needs {rows:,} rows for the data's ids, got {said['num_embeddings']:,}")
        bound = said["init_max"]
        configs.append(
            EmbeddingBagConfig(
                num_embeddings=said["num_embeddings"],
                embedding_dim=said["embedding_dim"],
                name=name,
                feature_names=[name],
                data_type=_member(DataType, said["data_type"], "data_type"),
                pooling=_member(PoolingType, said["pooling"], "pooling"),
                weight_init_max=bound,
                weight_init_min=None if bound is None else -bound,
            )
        )
    return configs


def _member(kind: Any, given: Any, what: str) -> Any:
    if isinstance(given, kind):
        return given
    if isinstance(given, str) and given.upper() in kind.__members__:
        return kind[given.upper()]
    names = [name.lower() for name in kind.__members__]
    raise ValueError(f"{what} must be one of {', '.join(names)}, got {given!r}{nearest(str(given), names)}")
