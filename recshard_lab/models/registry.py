"""Models by name: the names in config files, their settings, and how a model and its loss are built from tables.

A settings class is a frozen dataclass of plain values. ``register_model`` adds a model, also in a notebook.

Shape letters: I dense features, D embedding dim.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from recshard_lab.arguments import checks_arguments, names_wrong_arguments
from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.models.deepfm import DeepFMNN
from recshard_lab.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from recshard_lab.models.two_tower import Peers, StreamingFrequency, TwoTower, TwoTowerTrainTask

Device = torch.device | str | None


@dataclass(frozen=True)
class DLRMSettings:
    """Settings of `DLRM`.

    Args:
        dense_in_features: I.
        dense_hidden_sizes: widths of the bottom MLP before its last layer, whose width is D.
        over_arch_layer_sizes: widths of the top MLP.
    """

    dense_in_features: int = 0
    dense_hidden_sizes: Sequence[int] = (64,)
    over_arch_layer_sizes: Sequence[int] = (128, 64, 1)

    def bottom(self, dim: int) -> list[int]:
        """Widths of the whole bottom MLP."""
        return [*self.dense_hidden_sizes, dim] if self.dense_in_features else []


@dataclass(frozen=True)
class DLRMDCNSettings(DLRMSettings):
    """Settings of `DLRM_DCN`: those of DLRM, and layers and rank of the cross network."""

    dcn_num_layers: int = 3
    dcn_low_rank_dim: int = 32


@dataclass(frozen=True)
class DeepFMSettings:
    """Settings of `DeepFMNN`."""

    dense_in_features: int = 0
    deep_layer_sizes: Sequence[int] = (128, 64)


@dataclass(frozen=True)
class TwoTowerSettings:
    """Settings of `TwoTower` and its training.

    Args:
        layer_sizes: widths of the layers of both towers.
        query_tables: names of the query's tables. Default: the first table.
        normalize, in_batch_negatives, temperature, candidate_id: as of `TwoTower` and `TwoTowerTrainTask`.
        frequency_buckets: buckets of the correction for frequent candidates; 0 for no correction.
    """

    layer_sizes: Sequence[int] = (64, 32)
    query_tables: Sequence[str] | None = None
    normalize: bool = False
    in_batch_negatives: bool = False
    temperature: float = 1.0
    candidate_id: str | None = None
    frequency_buckets: int = 0


@dataclass(frozen=True)
class ModelKind:
    """A registered model.

    Args:
        name: of the model in configs.
        settings: its dataclass; every field has a default.
        build: (tables, settings, device of the dense part) -> the model.
        task: (model, settings, ranks that share a batch) -> a module that takes a batch and returns
            ``(loss, (loss, logits, labels))``.
    """

    name: str
    settings: type[Any]
    build: Callable[[EmbeddingBagCollection, Any, Device], nn.Module]
    task: Callable[[Any, Any, Peers | None], nn.Module] = lambda model, settings, peers: DLRMTrain(model)


_KINDS: dict[str, ModelKind] = {}


def register_model(kind: ModelKind) -> ModelKind:
    """Registers a model under its name. It replaces a model of the same name.

    Raises:
        ValueError: the settings are not a dataclass with a default for every field.
    """
    if not is_dataclass(kind.settings):
        raise ValueError(f"settings of model {kind.name!r} must be a dataclass, got {kind.settings!r}")
    try:
        kind.settings()
    except TypeError as error:
        raise ValueError(f"every setting of model {kind.name!r} needs a default: {error}") from error
    checks_arguments(kind.settings)  # values of another type are refused by the setting's name
    _KINDS[kind.name] = kind
    return kind


def model_names() -> list[str]:
    """Names of the registered models, sorted.

    >>> model_names()
    ['deepfm', 'dlrm', 'dlrm_dcn', 'two_tower']
    """
    return sorted(_KINDS)


def model_named(name: str) -> ModelKind:
    """A model by name.

    Raises:
        ValueError: the name is not registered.
    """
    if not isinstance(name, str) or name not in _KINDS:
        raise ValueError(
            f"no model is named {name!r}{_meant(name, _KINDS)}. Fix: use one of {', '.join(model_names())}"
        )
    return _KINDS[name]


def settings_of(name: str, given: Mapping[str, Any] | Any = None) -> Any:
    """The settings of a model, from plain values.

    Args:
        given: setting -> value, or an instance of the dataclass. Missing settings have their defaults.

    Raises:
        ValueError: an unknown model or setting, or a value of another type.

    >>> settings_of("dlrm_dcn", {"dcn_num_layers": 2})
    DLRMDCNSettings(dense_in_features=0, dense_hidden_sizes=(64,), over_arch_layer_sizes=(128, 64, 1), dcn_num_layers=2,
    dcn_low_rank_dim=32)
    """
    kind = model_named(name)
    if isinstance(given, kind.settings):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"settings of model {name!r} must be a mapping or {kind.settings.__name__}, got {given!r}")
    known = [field.name for field in fields(kind.settings)]
    chosen = {}
    for key, value in (given or {}).items():
        if key not in known:
            hint = _meant(key, known)
            raise ValueError(f"model {name!r} has no setting {key!r}{hint}. Fix: use one of {', '.join(known)}")
        chosen[key] = tuple(value) if isinstance(value, list) else value
    return kind.settings(**chosen)


@names_wrong_arguments
def build_model(
    name: str,
    tables: Sequence[EmbeddingBagConfig],
    settings: Mapping[str, Any] | Any = None,
    *,
    device: Device = None,
    dense_device: Device = None,
) -> nn.Module:
    """Builds an unsharded model.

    Args:
        name: of the model.
        tables: its embedding tables.
        settings: setting -> value, or the model's settings class.
        device: of the tables; "meta" allocates nothing.
        dense_device: of the other parameters.

    Raises:
        ValueError: an unknown model or setting, or values that do not fit the tables.

    >>> table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["f"])
    >>> type(build_model("dlrm_dcn", [table], {"over_arch_layer_sizes": [4, 1]}, device="meta")).__name__
    'DLRM_DCN'
    """
    chosen = settings_of(name, settings)
    return model_named(name).build(EmbeddingBagCollection(tables, device=device), chosen, dense_device)


@names_wrong_arguments
def train_task(
    name: str, model: nn.Module, settings: Mapping[str, Any] | Any = None, *, peers: Peers | None = None
) -> nn.Module:
    """The model with its loss: takes a batch, returns ``(loss, (loss, logits [b], labels [b]))``.

    Args:
        name, settings: as for `build_model`.
        model: from `build_model`.
        peers: the ranks that share a batch, for losses that compare its samples.

    Raises:
        ValueError: an unknown model or setting.
    """
    return model_named(name).task(model, settings_of(name, settings), peers)


def settings_as_dict(settings: Any) -> dict[str, Any]:
    """Plain values for a config file.

    >>> settings_as_dict(DeepFMSettings())
    {'dense_in_features': 0, 'deep_layer_sizes': [128, 64]}
    """
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(settings).items()}


def _meant(name: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _dlrm(ebc: EmbeddingBagCollection, own: DLRMSettings, device: Device) -> nn.Module:
    bottom = own.bottom(ebc.embedding_bag_configs()[0].embedding_dim)
    return DLRM(ebc, own.dense_in_features, bottom, own.over_arch_layer_sizes, device)


def _dlrm_dcn(ebc: EmbeddingBagCollection, own: DLRMDCNSettings, device: Device) -> nn.Module:
    bottom = own.bottom(ebc.embedding_bag_configs()[0].embedding_dim)
    cross = (own.dcn_num_layers, own.dcn_low_rank_dim)
    return DLRM_DCN(ebc, own.dense_in_features, bottom, own.over_arch_layer_sizes, *cross, dense_device=device)


def _deepfm(ebc: EmbeddingBagCollection, own: DeepFMSettings, device: Device) -> nn.Module:
    return DeepFMNN(ebc, own.dense_in_features, own.deep_layer_sizes, device)


def _two_tower(ebc: EmbeddingBagCollection, own: TwoTowerSettings, device: Device) -> nn.Module:
    return TwoTower(ebc, own.layer_sizes, device, query_tables=own.query_tables, normalize=own.normalize)


def _two_tower_task(model: TwoTower, own: TwoTowerSettings, peers: Peers | None) -> nn.Module:
    return TwoTowerTrainTask(
        model,
        in_batch_negatives=own.in_batch_negatives,
        temperature=own.temperature,
        candidate_id=own.candidate_id,
        frequency=StreamingFrequency(own.frequency_buckets) if own.frequency_buckets else None,
        peers=peers,
    )


register_model(ModelKind("dlrm", DLRMSettings, _dlrm))
register_model(ModelKind("dlrm_dcn", DLRMDCNSettings, _dlrm_dcn))
register_model(ModelKind("deepfm", DeepFMSettings, _deepfm))
register_model(ModelKind("two_tower", TwoTowerSettings, _two_tower, _two_tower_task))
