"""Words for people when tables do not fit: what, by how much, and what to change."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

from recshard_lab.embedding.configs import BaseEmbeddingConfig, DataType
from recshard_lab.planner.colocated import groups_of
from recshard_lab.planner.cost import CostModel
from recshard_lab.planner.cost_models import cost_model_named
from recshard_lab.planner.greedy import solve
from recshard_lab.planner.loads import MEMORY
from recshard_lab.planner.options import DoesNotFit, Placement, allowed_schemes, options_of
from recshard_lab.planner.text import gigabytes
from recshard_lab.planner.workload import Workload
from recshard_lab.sharding import ParameterConstraints, PlanError, Topology, scheme_names

LOOSER = {
    "shards": "leave its shards to the planner",
    "ranks": "allow other ranks than {}",
    "forbidden_ranks": "allow a rank of forbidden_ranks={}",
    "forbidden_sharding_types": "allow a scheme of forbidden_sharding_types={}",
    "device_group": "allow ranks outside device_group {!r}",
}
"""What to say of a constraint that is in the way."""


@dataclass(frozen=True)
class Refused:
    """What was asked for; position `stuck` of `tables` is the one that fits nowhere."""

    tables: Sequence[BaseEmbeddingConfig]
    stuck: int
    topology: Topology
    workload: Workload
    constraints: Mapping[str, ParameterConstraints]
    route: str | None = None
    cost_model: str = "recshard"

    @property
    def table(self) -> BaseEmbeddingConfig:
        return self.tables[self.stuck]

    @property
    def together(self) -> list[BaseEmbeddingConfig]:
        """The other tables that must lie on its ranks."""
        (group,) = (group for group in groups_of(self.tables, self.constraints) if self.stuck in group)
        return [self.tables[at] for at in group if at != self.stuck]

    def model(self) -> CostModel:
        return cost_model_named(self.cost_model)(self.tables, self.topology, self.workload, self.constraints)

    def placements(self) -> list[Placement] | None:
        """A plan without local search, None where there is none."""
        model = self.model()
        try:
            return solve(model, self.tables, self.constraints, passes=0, route=self.route).placements
        except (DoesNotFit, PlanError):
            return None

    def with_cap(self, cap: int) -> "Refused":
        """The same with other memory."""
        on_cuda = self.topology.compute_device == "cuda"
        top = replace(self.topology, hbm_cap=cap) if on_cuda else replace(self.topology, ddr_cap=cap)
        return replace(self, topology=top)


def what_does_not_fit(refused: Refused) -> str:
    """One sentence, at once."""
    table, wish = refused.table, refused.constraints.get(refused.table.name)
    where = f"on any rank under {', '.join(allowed_schemes(table, wish))}"
    if wish is not None and wish.shards is not None:
        where = "where its constraint puts it"
    size = f"{table.num_embeddings:,} x {table.embedding_dim:,}, {gigabytes(table.weight_bytes)}"
    others = f" beside the other {len(refused.tables) - 1} tables" if len(refused.tables) > 1 else ""
    shared, named = refused.together, ""
    if shared:
        total = gigabytes(sum(each.weight_bytes for each in (table, *shared)))
        named = f", with {', '.join(repr(each.name) for each in shared)} on the same ranks ({total} together),"
    return (
        f"table {table.name!r} ({size}){named} does not fit {where}{others} "
        f"(a rank has {gigabytes(_free(refused))} after the reserve)."
    )


def why_it_does_not_fit(refused: Refused) -> str:
    """What does not fit, by how much, and the smallest changes that were found to make it fit (each was planned)."""
    top = refused.topology
    needed, limit = _least_bytes(refused), _free(refused) * top.world_size
    lines = [what_does_not_fit(refused)]
    if needed > limit:
        lines.append(
            f"All tables need at least {gigabytes(needed)}, {top.world_size} ranks have {gigabytes(limit)}: "
            f"{gigabytes(needed - limit)} too little."
        )
    changes = [change for change in (_allow_more(refused), *_loosened(refused), _half(refused)) if change]
    cap = _smallest_cap(refused)
    if cap is not None:
        name = "hbm_cap" if top.compute_device == "cuda" else "ddr_cap"
        more = gigabytes(cap - top.memory_cap_bytes)
        changes.append(f"{name}={cap} ({gigabytes(cap)} a rank, {more} more)")
    lines.append("Smallest change that fits: " + (", or ".join(changes) or "none found; use more ranks") + ".")
    return " ".join(lines)


def _free(refused: Refused) -> int:
    return max(0, refused.topology.free_memory_bytes())


def _allow_more(refused: Refused) -> str | None:
    name = refused.table.name
    wish = refused.constraints.get(name)
    if wish is None or wish.sharding_types is None:
        return None
    for scheme in scheme_names():
        if scheme in [*wish.sharding_types, *(wish.forbidden_sharding_types or ())]:
            continue
        more = {**refused.constraints, name: replace(wish, sharding_types=[*wish.sharding_types, scheme])}
        found = replace(refused, constraints=more).placements()
        if found is not None:
            return f"allow {scheme} over {len(set(found[refused.stuck].ranks))} ranks"
    return None


def _loosened(refused: Refused) -> list[str]:
    """Constraints of the table without which a plan was found."""
    wish, found = refused.constraints.get(refused.table.name), []
    shared = refused.together
    if shared:
        apart = dict(refused.constraints)
        for name in {refused.table.name, *(each.name for each in shared)} & apart.keys():
            apart[name] = replace(apart[name], colocate_with=None)
        if replace(refused, constraints=apart).placements() is not None:
            found.append(f"leave colocate_with of {refused.table.name!r} and its partners out")
    for name, said in LOOSER.items():
        if wish is not None and getattr(wish, name) is not None:
            without = copy(wish)
            setattr(without, name, None)
            looser = {**refused.constraints, refused.table.name: without}
            if replace(refused, constraints=looser).placements() is not None:
                found.append(said.format(getattr(wish, name)))
    return found


def _half(refused: Refused) -> str | None:
    table = refused.table
    if table.data_type is not DataType.FP32:
        return None
    halved = [replace(t, data_type=DataType.FP16) if t is table else t for t in refused.tables]
    return f"fp16 weights for {table.name!r}" if replace(refused, tables=halved).placements() is not None else None


def _smallest_cap(refused: Refused) -> int | None:
    """The smallest capacity of a rank for which a plan was found, to about a percent, rounded up to MB."""

    def fits(cap: int) -> bool:
        return refused.with_cap(cap).placements() is not None

    low = max(1, refused.topology.memory_cap_bytes)
    high = low
    for _ in range(40):
        high *= 2
        if fits(high):
            break
        low = high
    else:
        return None
    while high - low > max(1_000_000, low // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    rounded = -(-high // 1_000_000) * 1_000_000
    return rounded if fits(rounded) else high


def _least_bytes(refused: Refused) -> float:
    """Bytes of all ranks together that no plan can do without: each table in its cheapest cut, and what is fixed."""
    model = refused.model()
    options = options_of(model, refused.tables, refused.constraints, refused.route)
    least = sum(min(float(option.loads[MEMORY:].sum()) for option in choices) for choices in options)
    return least + float(model.fixed_memory.sum()) * refused.topology.world_size
