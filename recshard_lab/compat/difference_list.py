"""What a script for TorchRec meets here: differences that `install` does not hide."""

from __future__ import annotations

from dataclasses import dataclass

from recshard_lab.text_table import Printable, TextTable


@dataclass(frozen=True)
class Difference:
    """One subject.

    Attributes:
        subject: what differs.
        torchrec: in TorchRec 1.8.
        here: in this library, also under its TorchRec names.
    """

    subject: str
    torchrec: str
    here: str


@dataclass(frozen=True)
class Differences(Printable):
    """All differences; `print` them.

    Attributes:
        rows: one per subject.
    """

    rows: tuple[Difference, ...]

    def parts(self) -> list[str | TextTable]:
        """The table."""
        return [TextTable(("subject", "TorchRec", "here"), [(d.subject, d.torchrec, d.here) for d in self.rows])]


_DIFFERENCES = (
    Difference("first weights on CPU", "each rank draws its shards", "scattered from rank 0, as on GPUs"),
    Difference("rectangles of a plan", "those of a named scheme", "any tiling: rs.sharding.tiling(...)"),
    Difference("a plan in a file", "torch.save(plan)", "plan.to_json(); from_torchrec reads theirs"),
    Difference("row-wise Adagrad, column shards", "one norm per column shard", "one norm per row, as unsharded"),
    Difference("mean pooling, mixed plan", "divided by the length twice", "divided once, as unsharded"),
    Difference("mean pooling, grid_shard", "the sum", "the mean, as unsharded"),
    Difference("path in DLRM", "sparse_arch.embedding_bag_collection", "embedding_bag_collection"),
    Difference("KeyedOptimizer.init_state", "steps with the learning rate", "steps with a learning rate of 0"),
    Difference("KeyedOptimizerWrapper.zero_grad", "ignores set_to_none", "follows set_to_none"),
    Difference("inference", "quant and inference modules", "rs.quantize_embeddings, rs.shard_for_inference"),
    Difference("ids out of range", "BoundsCheckMode", "out_of_range='error', 'clamp' or 'ignore'"),
)


def differences() -> Differences:
    """What differs from TorchRec 1.8 under its names.

    >>> print(differences().rows[1].here)
    any tiling: rs.sharding.tiling(...)
    """
    return Differences(_DIFFERENCES)
