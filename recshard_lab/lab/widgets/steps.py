"""The steps that a slider of the comparison can stand on."""

from __future__ import annotations

from collections.abc import Sequence

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab.draw.theme import bytes_text

WORLD_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_MANTISSAS = (1, 2, 4, 8, 16, 24, 32, 40, 64, 80, 128, 192, 256, 512)


def world_sizes(given: int) -> list[tuple[str, int]]:
    """Numbers of ranks, the reader's own among them."""
    return [(str(n), n) for n in sorted({*WORLD_SIZES, given})]


def batch_sizes(given: int) -> list[tuple[str, int]]:
    """Powers of two, the reader's own batch size among them."""
    return [(f"{n:,}", n) for n in sorted({*(1 << i for i in range(5, 17)), given})]


def memory_caps(tables: Sequence[BaseEmbeddingConfig], given: int) -> list[tuple[str, int]]:
    """Bytes of one rank, from far too little for these tables to more than enough, the reader's own among them.

    >>> memory_caps([BaseEmbeddingConfig(num_embeddings=1000, embedding_dim=16, name="t")], 64_000)[:3]
    [('1 KB', 1000), ('2 KB', 2000), ('4 KB', 4000)]
    """
    total = sum(table.weight_bytes for table in tables)
    steps = {m * unit for unit in (10**3, 10**6, 10**9) for m in _MANTISSAS}
    kept = {cap for cap in steps if total / 128 <= cap <= max(16 * total, given)}
    named = {bytes_text(cap): cap for cap in sorted(kept)}
    named[bytes_text(given)] = given  # one label, one value: the reader's exact one wins
    return sorted(named.items(), key=lambda item: item[1])
