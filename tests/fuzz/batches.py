"""The numbers of a case: weights, batches and the gradient of the loss. The same in the reference and on the ranks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recshard_lab import KeyedJaggedTensor
from recshard_lab.embedding.kernels import TORCH_DTYPES
from tests.distributed.views import VIEWS
from tests.fuzz.cases import Case

CURVE = 0.1  # gradients depend on rows, so that a wrong row in one step is a wrong weight in the next


def start_weights(case: Case) -> list[Tensor]:
    """``[E, D]`` of each table in its own format, away from zero."""
    generator = torch.Generator().manual_seed(case.number)
    made = []
    for table in case.tables:
        size = (table["num_embeddings"], table["embedding_dim"])
        drawn = torch.rand(size, generator=generator, dtype=torch.float64) - 0.5
        made.append((drawn + drawn.sign() * 0.1).to(TORCH_DTYPES[table["data_type"]]))
    return made


def features(case: Case) -> list[str]:
    return list(dict.fromkeys(name for table in case.tables for name in table["feature_names"]))


@dataclass(frozen=True)
class Bags:
    """One feature of one rank's batch: ids ``[N]``, lengths ``[B]``, per-sample weights ``[N]``."""

    ids: Tensor
    lengths: Tensor
    weights: Tensor


def bags(case: Case, step: int, rank: int, feature: str) -> Bags:
    """Empty bags, duplicates and both ends of the smallest table that reads the feature."""
    number = features(case).index(feature)
    generator = torch.Generator().manual_seed(case.number + 7919 * (1 + number + 50 * rank + 500 * step))
    rows = min(own["num_embeddings"] for own in case.tables if feature in own["feature_names"])
    sizes = torch.tensor([0, 0, 1, 2, 5, 9])
    lengths = sizes[torch.randint(0, 6, (case.sizes[step][rank],), generator=generator)]
    total = int(lengths.sum())
    ids = torch.randint(0, rows, (total,), generator=generator)
    ends = torch.rand(total, generator=generator)
    ids = torch.where(ends < 0.2, 0, torch.where(ends > 0.8, rows - 1, ids))
    weights = torch.rand(total, generator=generator) + 0.25
    weights[torch.rand(total, generator=generator) < 0.1] = 0.0
    return Bags(ids, lengths, weights)


def mixing(case: Case, step: int, output: int, rows: int, columns: int) -> Tensor:
    """The constant part of the gradient of an output of the global batch, exact in fp16 and more."""
    generator = torch.Generator().manual_seed(case.number + 104729 * (1 + output + 100 * step))
    return torch.randint(-16, 17, (rows, columns), generator=generator).double() / 16


def batch(case: Case, step: int, rank: int) -> tuple[KeyedJaggedTensor, Tensor | None]:
    """A rank's batch, each tensor a view of another kind and width; and its weights, where they want a gradient."""
    generator = torch.Generator().manual_seed(case.number + 31 * (step + 100 * rank))

    def choose(options: Any) -> Any:
        return options[int(torch.randint(0, len(options), (), generator=generator))]

    def view(tensor: Tensor) -> Tensor:
        kinds = [make for name, make in VIEWS.items() if name != "expanded"]
        return choose([*kinds, lambda own: own])(tensor) if tensor.numel() else tensor

    order = features(case)
    shuffled = [order[n] for n in torch.randperm(len(order), generator=generator).tolist()]
    parts = [bags(case, step, rank, name) for name in shuffled]
    kinds = [torch.int32, torch.int64]
    values = view(torch.cat([own.ids for own in parts]).to(choose(kinds)))
    lengths = torch.cat([own.lengths for own in parts]).to(choose(kinds))
    weights = view(torch.cat([own.weights for own in parts])) if case.weighted else None
    if weights is not None and case.weight_gradients:
        weights = weights.detach().requires_grad_()
    if choose([True, False]):
        cuts: dict[str, Any] = {"lengths": view(lengths)}
    else:
        cuts = {"offsets": view(torch.nn.functional.pad(lengths.cumsum(0, dtype=lengths.dtype), (1, 0)))}
    made = KeyedJaggedTensor(shuffled, values, weights, stride=case.sizes[step][rank], **cuts)
    return made, weights if case.weight_gradients else None
