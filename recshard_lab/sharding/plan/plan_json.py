"""A plan as JSON: exact round trip, a format version, and errors that name the field.

::

    {"schema": "recshard_lab.sharding_plan", "version": 1,
     "modules": {"ebc": {"movies": {"sharding_type": "row_wise", "compute_kernel": "fused", "ranks": [0, 1],
                                    "shards": [[rank, r0, r1, c0, c1], ...], "route": "two_hop"}}}}

``route`` is omitted if it is "direct". A shard in host memory is ``[rank, r0, r1, c0, c1, "ddr"]``. A table with kernel
"fused_uvm_caching" also has ``"cache_params": {"algorithm": "lru", "load_factor": 0.2}``.
"""

import json
from typing import Any

from recshard_lab.arguments import shown
from recshard_lab.documents import json_content, with_fix
from recshard_lab.embedding.dynamic.config import EmulatedCost
from recshard_lab.sharding.plan.cache_params import ALGORITHMS, CacheParams
from recshard_lab.sharding.plan.sharding_plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from recshard_lab.sharding.plan.types import (
    DDR,
    DISTINCT_ROWS,
    HBM,
    ROUTES,
    TIERS,
    EmbeddingComputeKernel,
    PlanError,
    Shard,
    ShardingType,
    nearest,
)

SCHEMA = "recshard_lab.sharding_plan"
VERSION = 1


def dumps(plan: ShardingPlan, indent: int | None = None) -> str:
    """`plan` as JSON text."""
    modules = {
        path: {
            name: {
                "sharding_type": sharding.sharding_type,
                "compute_kernel": sharding.compute_kernel,
                "ranks": sharding.ranks,
                "shards": [
                    [shard.rank, *shard.rows, *shard.cols, *([] if shard.tier == HBM else [shard.tier])]
                    for shard in sharding.shards
                ],
                **({} if sharding.route == "direct" else {"route": sharding.route}),
                **({} if sharding.cache_params is None else {"cache_params": sharding.cache_params.as_dict()}),
            }
            for name, sharding in tables.items()
        }
        for path, tables in plan.plan.items()
    }
    return json.dumps({"schema": SCHEMA, "version": VERSION, "modules": modules}, indent=indent)


def loads(text: str) -> ShardingPlan:
    """The plan in `text`, which `dumps` wrote.

    Raises:
        PlanError: malformed input, another format version, or an invalid field, by name.
    """
    try:
        return _plan(json_content(text, "the plan"))
    except ValueError as error:
        raise PlanError(with_fix(error, "write the plan again with plan.to_json()")) from None


def _plan(document: Any) -> ShardingPlan:
    document = _typed(document, dict, "the document")
    if document.get("schema") != SCHEMA:
        raise PlanError(
            f"field 'schema' must be {SCHEMA!r}, got {shown(document.get('schema'))}: this is not a sharding plan. "
            f"Fix: pass the text of plan.to_json()"
        )
    if document.get("version") != VERSION or isinstance(document.get("version"), bool):
        raise PlanError(
            f"the plan has format version {shown(document.get('version'))}, but this recshard_lab reads version "
            f"{VERSION}. Fix: update recshard_lab, or write the plan again with plan.to_json()"
        )
    _fields(document, ("schema", "version", "modules"), "the document")
    modules = {}
    for path, tables in _typed(document["modules"], dict, "modules").items():
        entries = _typed(tables, dict, f"modules[{path!r:.80}]")
        modules[path] = EmbeddingModuleShardingPlan(
            {name: _sharding(entry, f"modules[{path!r:.80}][{name!r:.80}]") for name, entry in entries.items()}
        )
    return ShardingPlan(modules)


def _sharding(entry: Any, where: str) -> ParameterSharding:
    required = ("sharding_type", "compute_kernel", "ranks", "shards")
    _fields(_typed(entry, dict, where), required, where, ("route", "cache_params"))
    cache = entry.get("cache_params")
    if cache is not None:
        spot = f"{where}.cache_params"
        _fields(_typed(cache, dict, spot), ("algorithm", "load_factor"), spot, ("cost",))
        if "cost" in cache:
            _fields(_typed(cache["cost"], dict, f"{spot}.cost"), (), f"{spot}.cost", ("latency_us", "gb_per_s"))
    ranks = entry["ranks"]
    if ranks is not None:
        ranks = [_whole(rank, f"{where}.ranks") for rank in _typed(ranks, list, f"{where}.ranks")]
    shards = []
    for i, numbers in enumerate(_typed(entry["shards"], list, f"{where}.shards")):
        spot = f"{where}.shards[{i}]"
        if len(_typed(numbers, list, spot)) not in (5, 6) or numbers[5:] not in ([], [DDR], [HBM]):
            raise PlanError(
                f"{spot} must be [rank, r0, r1, c0, c1] with an optional 'ddr', got {shown(numbers)}. Fix: write the "
                f"rank, the rows and the columns of this shard"
            )
        rank, r0, r1, c0, c1 = (_whole(number, spot) for number in numbers[:5])
        shards.append(Shard(rank, (r0, r1), (c0, c1), *numbers[5:]))
    try:
        return ParameterSharding(
            _typed(entry["sharding_type"], str, f"{where}.sharding_type"),
            _typed(entry["compute_kernel"], str, f"{where}.compute_kernel"),
            ranks,
            cache_params=None if cache is None else _cache(cache),
            shards=shards,
            route=_typed(entry.get("route", "direct"), str, f"{where}.route"),
        )
    except ValueError as error:
        raise PlanError(f"{where}: {error}") from None


def _cache(entry: dict[str, Any]) -> CacheParams:
    cost = entry.get("cost")
    return CacheParams(entry["algorithm"], entry["load_factor"], None if cost is None else EmulatedCost(**cost))


def _typed(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        name = {"dict": "an object", "list": "a list", "str": "a string"}[kind.__name__]
        raise PlanError(f"{where} must be {name}, got {shown(value)}. Fix: write {name} there")
    return value


def _whole(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise PlanError(f"{where} must hold whole numbers from 0 up, got {shown(value)}. Fix: correct this number")
    return value


def _fields(entry: dict[str, Any], expected: tuple[str, ...], where: str, optional: tuple[str, ...] = ()) -> None:
    for name in expected:
        if name not in entry:
            raise PlanError(f"{where} lacks the field {name!r}. Fix: add it")
    for name in entry:
        if name not in (*expected, *optional):
            known = (*expected, *optional)
            raise PlanError(
                f"{where} has an unknown field {name!r:.80}{nearest(name[:80], known)}; known: {', '.join(known)}. "
                f"Fix: rename or remove it"
            )


def plan_schema() -> dict[str, Any]:
    """The JSON Schema of a plan (draft 2020-12) as plain data, for editors and other programs.

    A schema cannot express everything. Reading a plan also refuses duplicate names and shards on ranks that ``ranks``
    lacks. `ShardingPlan.validate` refuses holes, overlaps and ranks that do not exist.

    >>> plan_schema()["properties"]["schema"]
    {'const': 'recshard_lab.sharding_plan'}
    """
    whole = {"type": "integer", "minimum": 0}
    kernels = ", ".join(kernel.value for kernel in EmbeddingComputeKernel)
    schemes = ", ".join(scheme.value for scheme in ShardingType)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "recshard_lab sharding plan",
        "description": "Every table of a model as shards: rows x columns on a rank.",
        "type": "object",
        "required": ["schema", "version", "modules"],
        "additionalProperties": False,
        "properties": {
            "schema": {"const": SCHEMA},
            "version": {"const": VERSION},
            "modules": {
                "description": "Path of a collection inside the model ('' is the model itself) -> its tables.",
                "type": "object",
                "additionalProperties": {"type": "object", "additionalProperties": {"$ref": "#/$defs/sharding"}},
            },
        },
        "$defs": {
            "sharding": {
                "description": "How one table is sharded, and which ranks store its shards.",
                "type": "object",
                "required": ["sharding_type", "compute_kernel", "ranks", "shards"],
                "additionalProperties": False,
                "properties": {
                    "sharding_type": {"description": f"{schemes}, or any other name.", "type": "string"},
                    "compute_kernel": {"description": f"One of {kernels}.", "type": "string"},
                    "ranks": {"description": "The participating ranks.", "type": ["array", "null"], "items": whole},
                    "shards": {"type": "array", "items": {"$ref": "#/$defs/shard"}},
                    "route": {"description": "The output path; omitted: direct.", "enum": [*ROUTES, DISTINCT_ROWS]},
                    "cache_params": {
                        "description": "The cache of kernel fused_uvm_caching.",
                        "type": "object",
                        "required": ["algorithm", "load_factor"],
                        "additionalProperties": False,
                        "properties": {
                            "algorithm": {"enum": list(ALGORITHMS)},
                            "load_factor": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                            "cost": {
                                "description": "An emulated cost of each access to rows that are not cached.",
                                "type": "object",
                                "additionalProperties": False,
                                "properties": {
                                    "latency_us": {"type": "number", "minimum": 0},
                                    "gb_per_s": {"type": ["number", "null"], "exclusiveMinimum": 0},
                                },
                            },
                        },
                    },
                },
                "if": {"properties": {"sharding_type": {"const": ShardingType.DATA_PARALLEL.value}}},
                "then": {"properties": {"route": {"const": "direct"}}},
            },
            "shard": {
                "description": "[rank, r0, r1, c0, c1]: rows [r0, r1) and columns [c0, c1) on a rank; then its memory.",
                "type": "array",
                "prefixItems": [whole] * 5,
                "items": {"enum": list(TIERS)},
                "minItems": 5,
                "maxItems": 6,
            },
        },
    }
