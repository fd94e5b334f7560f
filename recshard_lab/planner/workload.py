"""The training step to plan for: batch size, ids per bag, reuse of rows, optimizer.

Shape letters: B batch (samples of one rank), E rows, W ranks, T tables.
"""

import numbers
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding.configs import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType
from recshard_lab.planner.access import AccessProfile, measure
from recshard_lab.planner.model.codecs import codec_names
from recshard_lab.sharding import ParameterConstraints, PlanError
from recshard_lab.sharding.plan.row_shares import RowShares
from recshard_lab.sharding.plan.types import DISTINCT_ROWS

Array = NDArray[np.float64]

_BY_NAME = ("pooling_factors", "unique_fraction", "zipf_alpha")  # one number, or one each
_DENSE = (
    "dense_parameters", "dense_flops_per_sample", "dense_bytes_per_parameter", "dense_traffic_per_sample",
    "dense_features", "dense_launches",
)  # fmt: skip
_BY_TABLE = ("unique_fraction", "zipf_alpha", "access", "frequency_ordered")
_KEYS = {"pooling_factors": "feature", **dict.fromkeys(_BY_TABLE, "table")}  # argument -> what its entries are for
_NUMBERS = (*_BY_NAME, "batch_size", *_DENSE)
PIPELINES = ("none", "sparse_dist", "prefetch")


@names_wrong_arguments
@dataclass(frozen=True)
class Workload:
    """One training step.

    Args:
        batch_size: samples of one rank, B.
        pooling_factors: mean ids per bag: one number, or feature -> number (1 for other features).
        unique_fraction: distinct ids / ids of a table in the global batch, one number or table -> number. Default:
            from `access`, otherwise from `zipf_alpha`.
        zipf_alpha: skew of the ids, ``p(k) ~ k ** -alpha``: one number, or table -> number; 0 is uniform.
        optimizer: fbgemm's name of the embedding optimizer.
        weighted: ids carry per-sample weights.
        dense_parameters: parameters outside the tables.
        dense_flops_per_sample: forward and backward; Default: 6 per parameter (2 forward, 4 backward).
        dense_traffic_per_sample: bytes of device memory that the dense part reads and writes for a sample, forward and
            backward: activations and their gradients (`planner.sweep.mlperf_dense.linear_traffic`).
        matmul_precision: of dense layers, as in ``torch.set_float32_matmul_precision``: "highest" is float32 and "high"
            is TF32 (`Topology.tf32_flops_per_ms`).
        dense_bytes_per_parameter: weight and gradient; more for an optimizer with state.
        frequency_ordered: whether ids are sorted by use, row 0 the most used: True for all tables, or names of
            tables. The planner may then split rows by the skew of `access` or `zipf_alpha`. `FrequencyOrder` sorts
            ids this way.
        dense_launches: kernels that the host launches for the dense part in a step, `Topology.launch_ms` each. The
            dense part takes as long as its launches or its arithmetic, whichever is longer.
        access: how often rows are used: one `AccessProfile`, or table -> profile; "meta_2021" is the histogram that
            Meta published. It determines the distinct ids at every batch size.
        codecs: number formats of rows, and of their gradients, in messages: "fp16" for both, "fp16/bf16", a pair, or
            a `QCommsConfig`; stored as a pair of names.
        pipeline: the work that overlaps with a batch's compute (`planner/model/overlap.py`): "none"; "sparse_dist", the
            next batch's ids (`TrainPipelineSparseDist`); "prefetch", two batches ahead.
        pipeline_threads: on GPUs, whether a second host thread launches the pipeline's input side (`threads=` of the
            pipelines).
        dense_features: numbers per sample that pipelines copy to the device.
        index_dedup: whether sequence collections send each distinct id once, as with
            ``EmbeddingCollectionSharder(use_index_dedup=True)``. `EmbeddingShardingPlanner.plan` reads it from the
            sharders.

    With `unique_fraction`, `access` or a `zipf_alpha` above 0, on a calibrated topology, the planner also considers the
    output path "distinct_rows" for pooled tables without per-sample weights. It does not apply to variable batches: for
    these, set ``ParameterConstraints(route="direct")``.

    The planner and all predictions refuse a workload that names a table or a feature that the tables do not have. Use
    `for_tables` to plan a part of the tables.

    Raises:
        ValueError: a negative number, an optimizer without a cost, an `access` of another type, an unknown
            format.

    >>> Workload(batch_size=64, pooling_factors={"genres": 2.5}).pooling_factor("genres")
    2.5
    """

    batch_size: int = 512
    pooling_factors: Mapping[str, float] | float = 1.0
    unique_fraction: Mapping[str, float] | float | None = None
    zipf_alpha: Mapping[str, float] | float = 0.0
    optimizer: str = "exact_sgd"
    weighted: bool = False
    dense_parameters: int = 0
    dense_flops_per_sample: float | None = None
    dense_bytes_per_parameter: float = 8.0
    access: "Mapping[str, AccessProfile | str] | AccessProfile | str | None" = None
    codecs: Any = ("fp32", "fp32")
    pipeline: str = "none"
    pipeline_threads: bool = False
    dense_features: int = 0
    frequency_ordered: bool | Collection[str] = False
    dense_launches: int = 0
    index_dedup: bool = False
    matmul_precision: str = "highest"
    dense_traffic_per_sample: float = 0.0

    def __post_init__(self) -> None:
        optimizer = str(getattr(self.optimizer, "value", self.optimizer))
        made: dict[str, Any] = {"codecs": codec_names(self.codecs), "optimizer": optimizer}
        if optimizer not in OPTIMIZER_STATE_BYTES:
            known = ", ".join(OPTIMIZER_STATE_BYTES)
            raise ValueError(f"optimizer {optimizer!r} is not supported. Fix: use one of {known}")
        if self.access is not None:
            made["access"] = _profiles(self.access)
        ordered, batch = self.frequency_ordered, self.batch_size
        for name, kind, fix, holds in (
            ("pipeline", f"one of {', '.join(PIPELINES)}", "'none'", self.pipeline in PIPELINES),
            ("matmul_precision", "'highest' (float32) or 'high' (TF32)", "'highest'",
             self.matmul_precision in ("highest", "high")),
            ("pipeline_threads", "True or False", "True", isinstance(self.pipeline_threads, bool)),
            ("weighted", "True or False", "True", isinstance(self.weighted, numbers.Integral | np.bool_)),
            ("index_dedup", "True or False", "True", isinstance(self.index_dedup, bool)),
            ("frequency_ordered", "True, False or names of tables", "['movies']",
             isinstance(ordered, bool | list | tuple | Set)),
            ("batch_size", "a whole number from 1 up", "512",
             isinstance(batch, numbers.Integral) and not isinstance(batch, bool) and batch > 0),
        ):  # fmt: skip
            if not holds:
                raise ValueError(f"{name} must be {kind}, got {getattr(self, name)!r:.80}. Fix: {name}={fix}")
        for name in _NUMBERS:
            given: Any = getattr(self, name)
            for value in given.values() if isinstance(given, Mapping) and name in _BY_NAME else (given,):
                if value is None and name in ("unique_fraction", "dense_flops_per_sample"):
                    continue
                if not isinstance(value, numbers.Real) or not 0 <= float(value) < float("inf"):
                    raise ValueError(f"{name} must be a finite number and not negative, got {given!r}. Fix: {name}=0")
        made["frequency_ordered"] = ordered if isinstance(ordered, bool) else frozenset(ordered)
        made["dense_bytes_per_parameter"] = float(self.dense_bytes_per_parameter)
        for name in made:
            object.__setattr__(self, name, made[name])

    @classmethod
    @names_wrong_arguments
    def measured(cls, batches: Iterable[Any], tables: Sequence[BaseEmbeddingConfig], **arguments: Any) -> "Workload":
        """The training step that batches of a data set need: their size, ids per bag, and the reuse of rows.

        Args:
            batches: KeyedJaggedTensors, or batches that have one as ``sparse_features``, of one size. Each is one
                rank's batch. With more of them, `access` covers larger batches without extrapolation.
            tables: the tables whose ids are counted.
            arguments: of `Workload`; they override measured values.

        Raises:
            ValueError: no batches, features missing from them, ids outside their table, batches of several sizes.

        >>> class Bags:
        ...     def __init__(self, *bags): self.bags = bags
        ...     def values(self): return [id for bag in self.bags for id in bag]
        ...     def lengths(self): return [len(bag) for bag in self.bags]
        >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=9, embedding_dim=4, feature_names=["seen"])
        >>> load = Workload.measured([{"seen": Bags([1, 2], [2, 2])}], [movies])
        >>> load.batch_size, load.pooling_factor("seen"), load.profile("movies").unique_fraction
        (2, 2.0, 0.5)
        >>> load.profile("movies").coverage, load.profile("movies").hottest(rows=1)  # bags with ids; curve of accesses
        (1.0, 0.75)
        """
        return cls(**{**measure(batches, tables), **arguments})

    def check_names(self, tables: Sequence[BaseEmbeddingConfig]) -> None:
        """Raises a `PlanError` if an argument has an entry for a table or a feature that `tables` do not have.

        >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=9, embedding_dim=4, feature_names=["seen"])
        >>> Workload(pooling_factors={"seen": 20.0}, zipf_alpha={"movies": 1.0}).check_names([movies])
        """
        known = _known(tables)
        for argument, kind in _KEYS.items():
            given = getattr(self, argument)
            for name in given if isinstance(given, Mapping | frozenset) else ():
                if name not in known[kind]:
                    raise PlanError(_unknown(argument, kind, name, known, given))

    def for_tables(self, tables: Sequence[BaseEmbeddingConfig]) -> "Workload":
        """The same step with the entries of these tables and of their features only.

        >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=9, embedding_dim=4, feature_names=["seen"])
        >>> Workload(pooling_factors={"seen": 20.0, "liked": 3.0}).for_tables([movies]).pooling_factors
        {'seen': 20.0}
        """
        known, kept = _known(tables), dict[str, Any]()
        for argument, kind in _KEYS.items():
            given = getattr(self, argument)
            if isinstance(given, Mapping):
                kept[argument] = {name: value for name, value in given.items() if name in known[kind]}
            elif isinstance(given, frozenset):
                kept[argument] = given & known[kind].keys()
        return replace(self, **kept)

    def profile(self, table: str) -> AccessProfile | None:
        """How often the rows of `table` are used, where `access` says it."""
        found = self.access.get(table) if isinstance(self.access, Mapping) else self.access
        assert not isinstance(found, str)  # __post_init__ replaced names
        return found

    def knows_repeats(self, table: str) -> bool:
        """Whether this workload states how often the ids of `table` repeat, by any of three arguments."""
        given = self.unique_fraction
        if given is not None and (not isinstance(given, Mapping) or table in given):
            return True
        return self.skew(table) > 0 or self.profile(table) is not None

    def skew(self, table: str) -> float:
        """`zipf_alpha` of `table`."""
        given = self.zipf_alpha
        return float(given.get(table, 0.0) if isinstance(given, Mapping) else given)

    def row_shares(self, table: BaseEmbeddingConfig) -> RowShares | None:
        """How the lookups of a table with sorted ids spread over its rows; None where the workload knows no skew."""
        profile = self.profile(table.name)
        if profile is not None:
            return profile.row_shares(table.num_embeddings)
        skew = self.skew(table.name)
        return RowShares.zipf(table.num_embeddings, skew) if skew > 0 else None

    def pooling_factor(self, feature: str) -> float:
        """Mean ids a bag of `feature`."""
        given = self.pooling_factors
        return float(given.get(feature, 1.0) if isinstance(given, Mapping) else given)


# optimizer -> bytes of state per row, and per element, of fp32 state
OPTIMIZER_STATE_BYTES: dict[str, tuple[int, int]] = {
    "exact_sgd": (0, 0),
    "exact_row_wise_adagrad": (4, 0),
    "exact_adagrad": (0, 4),
    "adam": (0, 8),
    "partial_row_wise_adam": (4, 4),
    "lamb": (0, 8),
    "partial_row_wise_lamb": (4, 4),
    "lars_sgd": (0, 4),
}
# optimizer -> sums over a row's columns that its step needs; column shards exchange them
ROW_SUMS: dict[str, int] = {
    "exact_row_wise_adagrad": 1,
    "partial_row_wise_adam": 1,
    "lamb": 2,
    "partial_row_wise_lamb": 3,
    "lars_sgd": 2,
}


@dataclass(frozen=True)
class TableLoads:
    """The loads of each table before it is split; arrays of T.

    Attributes:
        ids: ids of one rank's batch; bags: bags of it; filled: the bags with ids by the profile's coverage, or an upper
            bound.
        unique: distinct ids / ids in the global batch.
        touched: distinct rows that each feature of one rank's batch reads, summed over features.
        rows, cols: E and D. element_bytes: of the weights. index_bytes: of the index per row.
        dynamic: 1.0 for dynamic tables. id_bytes: of an id or a length in a message.
        pooled: 1.0 if a bag becomes one vector, 0.0 if every id keeps its vector.
        weighted: 1.0 if ids have weights.
    """

    ids: Array
    bags: Array
    unique: Array
    touched: Array
    rows: Array
    cols: Array
    element_bytes: Array
    index_bytes: Array
    dynamic: Array
    id_bytes: Array
    pooled: Array
    weighted: Array
    features: Array = field(repr=False)
    filled: Array = field(repr=False)


def table_loads(
    tables: Sequence[BaseEmbeddingConfig],
    world_size: int,
    workload: Workload,
    constraints: Mapping[str, ParameterConstraints] | None = None,
) -> TableLoads:
    """The loads of `tables`; constraints' pooling_factors, num_poolings and batch_sizes override the workload's.

    Raises:
        PlanError: a constraint whose lists are not one entry per feature; a name in the workload that no table has.
    """
    workload.check_names(tables)
    ids: list[float] = []
    bags: list[float] = []
    filled: list[float] = []
    weighted: list[bool] = []
    for table in tables:
        constraint = constraints.get(table.name) if constraints else None
        factors: Sequence[float] = [workload.pooling_factor(feature) for feature in table.feature_names]
        each: Sequence[float] = [float(workload.batch_size)] * len(factors)  # bags
        if constraint is not None:
            poolings = _per_feature(table, "num_poolings", constraint.num_poolings, [1.0] * len(each))
            samples = _per_feature(table, "batch_sizes", constraint.batch_sizes, each)
            factors = _per_feature(table, "pooling_factors", constraint.pooling_factors, factors)
            each = [count * many for count, many in zip(samples, poolings, strict=True)]
        bags.append(sum(each))
        profile = workload.profile(table.name)
        covered = 1.0 if profile is None or profile.coverage is None else profile.coverage
        filled.append(sum(count * min(covered, factor) for count, factor in zip(each, factors, strict=True)))
        ids.append(sum(count * factor for count, factor in zip(each, factors, strict=True)))
        weighted.append(workload.weighted or (constraint is not None and constraint.is_weighted))
    rows = np.array([table.num_embeddings for table in tables], dtype=float)
    sent = np.array(ids, dtype=float)
    features = np.array([max(1, table.num_features()) for table in tables], dtype=float)
    unique = _unique(tables, rows, sent * world_size, workload)
    dynamic = np.array([table.dynamic for table in tables], dtype=float)
    touched = features * distinct_in_part(unique, sent * world_size, features * world_size)
    for i, profile in _profiled(tables, workload):
        touched[i] = features[i] * profile.distinct(sent[i] / features[i], rows[i])
    return TableLoads(
        ids=sent,
        bags=np.array(bags, dtype=float),
        unique=unique,
        touched=touched,
        rows=rows,
        cols=np.array([table.embedding_dim for table in tables], dtype=float),
        element_bytes=np.array([table.data_type.bytes_per_element for table in tables]),
        index_bytes=np.array([table.index_bytes_per_row for table in tables], dtype=float),
        dynamic=dynamic,
        id_bytes=4 + 4 * dynamic,  # int32, or int64
        pooled=np.array([is_pooled(table) for table in tables], dtype=float),
        weighted=np.array(weighted, dtype=float),
        features=features,
        filled=np.array(filled, dtype=float),
    )


def is_pooled(table: BaseEmbeddingConfig) -> bool:
    """Whether a bag of this table becomes one vector."""
    return isinstance(table, EmbeddingBagConfig) and table.pooling is not PoolingType.NONE


def check_route_applies(config: BaseEmbeddingConfig, route: str) -> None:
    """Raises a `PlanError` for an output path other than "direct" if the table is not pooled, and for distinct ids of a
    dynamic table."""
    if config.dynamic and route == DISTINCT_ROWS:
        raise PlanError(
            f"table {config.name!r} is dynamic, and route {route!r} does not send its ids. Fix: route='direct' for "
            f"this table"
        )
    if route != "direct" and not is_pooled(config):
        raise PlanError(
            f"table {config.name!r} is not pooled, so its rows are not added on any route, and {route!r} does not "
            f"apply to it. Fix: route='direct' for this table"
        )


def expected_unique(rows: Array, ids: Array, alpha: Array) -> Array:
    """Distinct rows among `ids` draws from `rows` rows with ``p(k) ~ k ** -alpha``; arrays of T.

    ``E[U] = sum_k 1 - exp(-N p(k))`` (Poissonised draws). The first 16 rows are summed one by one, the rest over 48
    bins whose edges grow geometrically.
    """
    first = np.arange(1.0, 17.0)
    head = first <= rows[:, None]
    edges = 16.5 * (np.maximum(rows[:, None] + 0.5, 16.5) / 16.5) ** np.linspace(0, 1, 49)
    power = 1.0 - alpha[:, None]
    flat = np.abs(power) < 1e-9
    primitive = np.where(flat, np.log(edges), edges**power / np.where(flat, 1.0, power))
    mass = np.concatenate([head * first ** -alpha[:, None], np.diff(primitive, axis=1)], axis=1)
    width = np.concatenate([head, np.diff(edges, axis=1)], axis=1)
    mass /= mass.sum(axis=1, keepdims=True)
    mean = np.where(width > 0, ids[:, None] * mass / np.where(width > 0, width, 1.0), 0.0)
    return np.asarray((width * -np.expm1(-mean)).sum(axis=1))


def distinct_in_part(unique: Array, ids: Array, parts: Array) -> Array:
    """Distinct rows in one of `parts` equal parts of a batch with `ids` ids, of which ``unique * ids`` are distinct.

    All rows that occur are taken as equally likely: ``u = (1 - exp(-x)) / x`` with x ids per row, solved for x by
    bisection of its logarithm. Skewed ids have fewer distinct rows.

    >>> whole, half = (distinct_in_part(*(np.array([x]) for x in (0.6, 100.0, parts))) for parts in (1.0, 2.0))
    >>> round(float(whole[0]), 3), round(float(half[0]), 1)
    (60.0, 38.2)
    """
    low, high = np.full(ids.shape, -30.0), np.full(ids.shape, 30.0)
    for _ in range(50):
        middle = (low + high) / 2
        more = -np.expm1(-np.exp(middle)) / np.exp(middle) > unique
        low, high = np.where(more, middle, low), np.where(more, high, middle)
    each = np.exp(low)
    return np.asarray(ids / each * -np.expm1(-each / parts))


def _unique(tables: Sequence[BaseEmbeddingConfig], rows: Array, ids: Array, workload: Workload) -> Array:
    def per_table(given: Mapping[str, float] | float, default: float) -> Array:
        if isinstance(given, Mapping):
            return np.array([given.get(table.name, default) for table in tables], dtype=float)
        return np.full(len(tables), float(given))

    if workload.unique_fraction is not None and not isinstance(workload.unique_fraction, Mapping):
        return per_table(workload.unique_fraction, 1.0)
    drawn = np.maximum(ids, 1e-9)
    unique = expected_unique(rows, drawn, per_table(workload.zipf_alpha, 0.0)) / drawn
    for i, profile in _profiled(tables, workload):
        unique[i] = profile.unique_at(drawn[i], rows[i])
    if workload.unique_fraction is None:
        return unique
    known = per_table(workload.unique_fraction, np.nan)
    return np.where(np.isnan(known), unique, known)


def _profiled(tables: Sequence[BaseEmbeddingConfig], workload: Workload) -> list[tuple[int, AccessProfile]]:
    """Indices and profiles of the tables whose distinct ids follow from `access`."""
    if workload.access is None:
        return []
    known = workload.unique_fraction
    if known is not None and not isinstance(known, Mapping):
        return []
    profiles = ((i, table.name, workload.profile(table.name)) for i, table in enumerate(tables))
    return [(i, profile) for i, name, profile in profiles if profile is not None and name not in (known or {})]


def _known(tables: Sequence[BaseEmbeddingConfig]) -> dict[str, dict[str, list[str]]]:
    """For "table": name -> its features. For "feature": name -> the tables that read it."""
    features: dict[str, list[str]] = {}
    for table in tables:
        for feature in table.feature_names:
            features.setdefault(feature, []).append(table.name)
    return {"table": {table.name: table.feature_names for table in tables}, "feature": features}


def _unknown(
    argument: str, kind: str, name: Any, known: Mapping[str, Mapping[str, Sequence[str]]], given: Collection[str]
) -> str:
    """The error for an entry of a `Workload` that belongs to no table."""
    from recshard_lab.planner.answers.text import use_one_of  # which imports this module

    other = "table" if kind == "feature" else "feature"
    if meant := known[other].get(name):
        named = f"its {kind}{'s' * (len(meant) > 1)} {' and '.join(map(repr, meant))}"
        return f"{argument} names {name!r}, which is a {other}, but its keys are {kind}s. Fix: use {named}"
    if known[kind].keys() <= set(given):  # no name of these tables is missing: the others are probably of more tables
        return f"{argument} names {name!r:.80}, which is not a {kind} of these tables. Fix: workload.for_tables(tables)"
    return f"{argument} names {name!r:.80}, which is not a {kind}{use_one_of(name, known[kind])}"


def _profiles(given: object) -> AccessProfile | dict[str, AccessProfile]:
    """The value of `Workload.access`, with profiles instead of names."""
    if isinstance(given, Mapping):
        return {name: _profile(each) for name, each in given.items()}
    return _profile(given)


def _profile(given: object) -> AccessProfile:
    if isinstance(given, AccessProfile):
        return given
    if given == "meta_2021":
        return AccessProfile.meta_2021()
    raise ValueError(
        f"access must be an AccessProfile, 'meta_2021', or one of them for each table, got {given!r:.80}. Fix: "
        f"access='meta_2021'"
    )


def _per_feature(
    table: BaseEmbeddingConfig, name: str, given: Sequence[float] | None, default: Sequence[float]
) -> Sequence[float]:
    if not given:
        return default
    if len(given) != len(default):
        raise PlanError(
            f"table {table.name!r} has {len(default)} features, but its constraint {name} has {len(given)} "
            f"entries. Fix: one entry per feature"
        )
    return given
