"""What a plan becomes outside of this process: JSON, its schema, TorchRec's plan, a script for torchrun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.sharding.asked import known


class Exported:
    """The part of `ShardingPlan` that writes it."""

    def to_json(self: Any, indent: int | None = None) -> str:
        """This plan as JSON with a schema version; `from_json` gives back an equal plan."""
        from recshard_lab.sharding.plan_json import dumps

        return dumps(self, indent)

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The JSON Schema (draft 2020-12) of what `to_json` writes, as plain data.

        >>> Exported.json_schema()["title"]
        'recshard_lab sharding plan'
        """
        from recshard_lab.sharding.plan_schema import plan_schema

        return plan_schema()

    @names_wrong_arguments
    def to_torchrec(
        self: Any,
        world_size: int | None = None,
        local_world_size: int | None = None,
        device_type: str = "cpu",
        paths: Mapping[str, str] | None = None,
    ) -> Any:
        """The same plan as an installed TorchRec's ``ShardingPlan``; see `recshard_lab.compat.plans.to_torchrec`.

        Raises:
            PlanError: a table whose rectangles TorchRec would not run as they are, by name, with a fix.
            ImportError: TorchRec is not installed.
        """
        from recshard_lab.compat.plans import to_torchrec

        return to_torchrec(self, world_size, local_world_size, device_type, paths)

    @names_wrong_arguments
    def to_script(self: Any, model: str | None = None, *, planner: Any = None, tables: Any = None) -> str:
        """A script for ``torchrun`` that trains under this plan, as one file to be run and then edited.

        Its tables, batch size and optimizer are those it was planned for; its batches are random.

        Args:
            model: ``package.module:factory`` or ``path/file.py:factory`` of the model that was planned for; left out,
                the script brings a small model of its own over the same tables.
            planner, tables: as for `explain`.

        Returns:
            The script's text.

        Raises:
            PlanError: no planner made this plan, and none is given; a table with an ``init_fn``, or a model whose
                ``forward`` takes what a script cannot make.

        >>> from recshard_lab import EmbeddingBagConfig, EmbeddingShardingPlanner, Topology
        >>> table = EmbeddingBagConfig(100, 8, name="movies", feature_names=["seen"])
        >>> plan = EmbeddingShardingPlanner(Topology(2)).plan_tables([table])
        >>> plan.to_script().splitlines()[0][3:]
        'Trains 1 table under a plan for 2 ranks. Written by recshard_lab, to be edited.'
        """
        return known(self, planner, tables).script(self, model)
