"""The JSON Schema of a plan (draft 2020-12), for editors and other programs.

What a schema cannot say is checked when a plan is read: a name that occurs twice, a shard on a rank that ``ranks`` does
not name; and when it meets its tables (`ShardingPlan.validate`): holes, overlaps, ranks that do not exist.
"""

from typing import Any

from recshard_lab.sharding.plan_json import SCHEMA, VERSION
from recshard_lab.sharding.shard import TIERS
from recshard_lab.sharding.types import ROUTES, EmbeddingComputeKernel, ShardingType


def plan_schema() -> dict[str, Any]:
    """The schema as plain data.

    >>> plan_schema()["properties"]["schema"]
    {'const': 'recshard_lab.sharding_plan'}
    """
    whole = {"type": "integer", "minimum": 0}
    kernels = ", ".join(kernel.value for kernel in EmbeddingComputeKernel)
    schemes = ", ".join(scheme.value for scheme in ShardingType)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "recshard_lab sharding plan",
        "description": "Every table of a model as rectangles, rows by columns on a rank.",
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
                "description": "How one table is cut and where the pieces go.",
                "type": "object",
                "required": ["sharding_type", "compute_kernel", "ranks", "shards"],
                "additionalProperties": False,
                "properties": {
                    "sharding_type": {"description": f"{schemes}, or a name of one's own.", "type": "string"},
                    "compute_kernel": {"description": f"One of {kernels}.", "type": "string"},
                    "ranks": {"description": "Those that take part.", "type": ["array", "null"], "items": whole},
                    "shards": {"type": "array", "items": {"$ref": "#/$defs/shard"}},
                    "route": {"description": "How its rows come home; left out: direct.", "enum": list(ROUTES)},
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
