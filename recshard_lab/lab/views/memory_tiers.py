"""The memories of ranks as the memory view draws them: their own, and the host's where it is another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recshard_lab.lab.draw.theme import bytes_text

Stacks = dict[str, tuple[Sequence[str], np.ndarray]]


@dataclass(frozen=True, eq=False)
class Tier:
    """One memory of every rank.

    Args:
        name: of the memory; empty if unknown.
        stacks: "predicted", "counted", "measured" -> categories and bytes ``[W, C]``.
        capacity, usable: ``[W]``.
    """

    name: str
    stacks: Stacks
    capacity: np.ndarray
    usable: np.ndarray


def own_memory(estimate: Any, measured: Any, topology: Any) -> Tier:
    """What a rank computes on: HBM of a GPU; of a CPU the host's memory."""
    stacks = {"predicted": _stack(estimate)}
    if measured is not None:
        stacks["counted"] = _stack(measured)
    if in_use := getattr(measured, "in_use", ()):
        parts = np.array([list(one.parts.values()) for one in in_use], dtype=float)
        stacks["measured"] = (list(in_use[0].parts), parts)
    capacity = np.asarray(estimate.capacity_bytes, dtype=float)
    device = getattr(topology, "compute_device", None)
    name = "HBM" if device == "cuda" else "host memory, shared by a node's ranks" if device == "cpu" else ""
    if not name and host_memory(estimate, measured) is not None:
        name = "the rank's own memory"
    return Tier(name, stacks, capacity, np.asarray(estimate.usable_bytes, dtype=float))


def host_memory(estimate: Any, measured: Any) -> Tier | None:
    """Weights and optimizer state in host memory beside GPU ranks; None if the plan stores none there."""
    held, counted = getattr(estimate, "host_bytes", None), getattr(measured, "host_memory_bytes", None)
    if held is None and counted is None:
        return None
    ranks = len(np.asarray(estimate.capacity_bytes))
    total = np.zeros(ranks) if held is None else np.asarray(held, dtype=float)
    weights = getattr(estimate, "host_weight_bytes", None)
    weights = total if weights is None else np.asarray(weights, dtype=float)
    names = ("weights", "optimizer_state")
    stacks: Stacks = {"predicted": (names, np.stack([weights, total - weights], axis=1))}
    if measured is not None:
        stacks["counted"] = (names, np.zeros((ranks, 2)) if counted is None else np.asarray(counted, dtype=float))
    room = np.full(ranks, float(getattr(estimate, "host_room_bytes", 0.0)))
    return Tier("host memory", stacks, room, room)


def problem_of(tier: Tier) -> str:
    """Why a tier cannot be drawn; empty if it can."""
    ranks = len(tier.stacks["predicted"][1])
    for kind, (_, values) in tier.stacks.items():
        if len(values) != ranks:
            return f"{len(values)} ranks were {kind}, {ranks} predicted: not the same plan."
        good = np.isfinite(values).all(axis=1) & np.isfinite(tier.usable)
        if not good.all():
            return f"The {kind} memory of rank {int(np.argmin(good))} is not a number."
    return ""


def words_on_sharing(topology: Any) -> str:
    """A note on CPU ranks, which share the host's memory."""
    if getattr(topology, "compute_device", None) != "cpu":
        return ""
    local, share = topology.local_world_size, topology.memory_cap_bytes
    if local == 1:
        return "A CPU rank uses the host's memory. Rows with the tier ddr are in the same memory."
    return (
        f"The {local} CPU ranks of a node share the host's memory: {bytes_text(local * share)}, "
        f"{bytes_text(share)} per rank. Rows with the tier ddr are in the same memory."
    )


def _stack(source: Any) -> tuple[Sequence[str], np.ndarray]:
    """Categories and bytes ``[W, C]`` in use."""
    return list(source.memory_categories), np.asarray(source.memory_bytes, dtype=float)
