"""Plans for the options that ``recshard plan make``, ``explain`` and ``diff`` share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recshard_lab.cli.options import PlannerOptions, machine_of, note_on_stderr

if TYPE_CHECKING:
    from recshard_lab.planner import EmbeddingShardingPlanner
    from recshard_lab.sharding import ShardingPlan
    from recshard_lab.sources import Source


@dataclass(frozen=True)
class Planning:
    """A planner for the tables of a source.

    Attributes:
        source: the tables.
        planner: with the machine, the training step and the constraints of the options.
        topology: the machine as it was named.
    """

    source: Source
    planner: EmbeddingShardingPlanner
    topology: str

    @classmethod
    def of(
        cls,
        source: str,
        options: PlannerOptions,
        keep_search: bool = False,
    ) -> Planning:
        """Reads the source and makes the planner. Notes on stderr which machine is planned for, if no option names it.

        Raises:
            ValueError, OSError: as `read_source`, `Topology.preset`, `Workload` and the planner.
        """
        from recshard_lab.planner import EmbeddingShardingPlanner, read_constraints
        from recshard_lab.planner.answers.text import gigabytes
        from recshard_lab.sources import read_source

        read = read_source(source)
        for note in read.notes:
            note_on_stderr(note)
        machine = machine_of(options)
        if not options.topology and options.ranks is None:
            note_on_stderr(
                f"planned for {machine.world_size} CPU ranks of this machine, {gigabytes(machine.memory_cap_bytes)} "
                f"each. --ranks changes their number; --topology h100x8 plans for another machine."
            )
        workload = read.workload(batch_size=options.batch_size, optimizer=options.optimizer, pipeline=options.pipeline)
        names = [table.name for table in read.configs]
        planner = EmbeddingShardingPlanner(
            machine,
            constraints=None if options.constraints is None else read_constraints(options.constraints, names),
            workload=workload,
            solver=options.solver,
            cost_model=options.cost_model,
            keep_search=keep_search,
        )
        return cls(read, planner, options.topology)

    def plan(self, path: Path | None = None) -> ShardingPlan:
        """The planner's plan, or the plan of a file with its estimate."""
        if path is None:
            return self.source.plan(self.planner)
        machine = self.planner.topology
        read = read_plan(path).resolved(self.source.by_module, machine.world_size, machine.local_world_size)
        read.planned = self.planner.record(read, self.source.by_module)
        return read


def read_plan(path: Path) -> ShardingPlan:
    """The plan of a JSON file.

    Raises:
        PlanError: the mistake, with the file's name.
        OSError: the file cannot be read.
    """
    from recshard_lab.documents import read_text
    from recshard_lab.sharding import PlanError, ShardingPlan

    try:
        return ShardingPlan.from_json(read_text(path, (".json",))[1])
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
