"""One module per table beside one fused collection: time and operators of forward, backward and optimizer.

Shape letters: N ids, D columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding import EmbeddingBagConfig, FusedEmbeddingBagCollection
from recshard_lab.sparse import KeyedJaggedTensor
from recshard_lab.text_table import TextTable

SEPARATE, FUSED = "one module per table", "one fused collection"
PHASES = ("forward", "backward", "optimizer")
_LR = 0.01

Step = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class LookupComparison:
    """One training step of the same tables, in two ways.

    The fused collection steps its rows inside backward, so its optimizer phase is empty.

    Args:
        ms: way -> phase -> shortest time, in ms.
        operators: way -> phase -> operators that torch dispatches; these do not depend on the machine's speed.
        gradient_bytes: of the sparse gradients that the separate modules write, ids included. The fused way has none.
    """

    ms: dict[str, dict[str, float]]
    operators: dict[str, dict[str, int]]
    gradient_bytes: int

    @property
    def ratio(self) -> float:
        """Step time of separate modules over that of the fused collection."""
        return sum(self.ms[SEPARATE].values()) / sum(self.ms[FUSED].values())

    def __str__(self) -> str:
        head = ["way", *(f"{phase} ms" for phase in PHASES), *(f"{phase} ops" for phase in PHASES)]
        rows = [
            [way, *(f"{self.ms[way][p]:.2f}" for p in PHASES), *(str(self.operators[way][p]) for p in PHASES)]
            for way in (SEPARATE, FUSED)
        ]
        return TextTable(tuple(head), tuple(tuple(row) for row in rows)).text


@names_wrong_arguments
def compare_lookups(
    tables: Sequence[EmbeddingBagConfig], batch: KeyedJaggedTensor, repeats: int = 9
) -> LookupComparison:
    """Trains the tables with SGD, once as ``nn.EmbeddingBag`` modules with sparse gradients and once fused.

    The two ways take turns. The loss is the sum of all outputs.

    Args:
        tables: each with one feature, pooled by SUM.
        batch: has their features.
        repeats: steps of each way; the shortest time of each phase is kept.

    Raises:
        ValueError: a table with several features, or fewer repeats than 1.

    >>> table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    >>> batch = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
    >>> found = compare_lookups([table], batch, repeats=1)
    >>> found.gradient_bytes, found.operators["one fused collection"]["optimizer"]
    (72, 0)
    """
    shared = [table.name for table in tables if len(table.feature_names) != 1]
    if shared or repeats < 1:
        problem = f"table {shared[0]!r} has several features" if shared else f"repeats is {repeats}"
        raise ValueError(f"{problem}: each way runs every table once, 1 time or more. Fix: one feature per table")
    modules = nn.ModuleList(nn.EmbeddingBag(t.num_embeddings, t.embedding_dim, mode="sum", sparse=True) for t in tables)
    ways = {SEPARATE: _separate(modules, tables, batch), FUSED: _fused(tables, batch)}
    ms: dict[str, dict[str, float]] = {way: dict.fromkeys(PHASES, float("inf")) for way in ways}
    for _ in range(repeats + 3):  # the first three warm up
        for way, step in ways.items():
            for phase in PHASES:
                begun = perf_counter()
                step[phase]()
                ms[way][phase] = min(ms[way][phase], 1e3 * (perf_counter() - begun))
    operators: dict[str, dict[str, int]] = defaultdict(dict)
    size = 0
    for way, step in ways.items():
        for phase in PHASES:
            operators[way][phase] = _dispatched(step[phase])
            if (way, phase) == (SEPARATE, "backward"):
                size = sum(_bytes_of(weight.grad) for weight in modules.parameters() if weight.grad is not None)
    return LookupComparison(ms, dict(operators), size)


def _separate(modules: nn.ModuleList, tables: Sequence[EmbeddingBagConfig], batch: KeyedJaggedTensor) -> Step:
    optimizer = torch.optim.SGD(modules.parameters(), lr=_LR)
    kept: list[Tensor] = []

    def forward() -> None:
        bags = [batch[table.feature_names[0]] for table in tables]
        kept[:] = [m(bag.values(), bag.offsets()[:-1]) for m, bag in zip(modules, bags, strict=True)]

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return {"forward": forward, "backward": lambda: torch.cat(kept, 1).sum().backward(), "optimizer": step}


def _fused(tables: Sequence[EmbeddingBagConfig], batch: KeyedJaggedTensor) -> Step:
    collection = FusedEmbeddingBagCollection(list(tables), torch.optim.SGD, {"lr": _LR})
    kept: list[Tensor] = []

    def forward() -> None:
        kept[:] = [collection(batch).values()]

    return {"forward": forward, "backward": lambda: kept[0].sum().backward(), "optimizer": lambda: None}


def _bytes_of(sparse: Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in (sparse._indices(), sparse._values()))


def _dispatched(run: Callable[[], Any]) -> int:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func.namespace != "profiler"
            return func(*args, **(kwargs or {}))

    with Counter() as counter:
        run()
    return counter.count
