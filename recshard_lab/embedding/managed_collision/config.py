"""A table of fixed size whose ids have any value, as plans cut it and as ranks store it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from recshard_lab.embedding.configs import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType
from recshard_lab.embedding.managed_collision.modules import ManagedCollisionModule


@dataclass
class ManagedEmbeddingConfig(EmbeddingBagConfig):
    """A table of fixed size whose ids have any value. A sequence table has ``PoolingType.NONE``.

    Args:
        partitions: buckets of rows. Shards have whole ones.
        least_equal_rows: of a module with one bucket, whose row shards become buckets. See `BaseEmbeddingConfig`.
        module: the module of the unsharded table, whose settings those of shards have. Plans need none.
    """

    dynamic: ClassVar[bool] = True

    partitions: int = 1
    least_equal_rows: int = 0
    module: Any = None

    @staticmethod
    def of(table: BaseEmbeddingConfig, module: ManagedCollisionModule) -> ManagedEmbeddingConfig:
        """A table with the cuts that its module allows."""
        given = {f.name: getattr(table, f.name) for f in fields(EmbeddingBagConfig) if hasattr(table, f.name)}
        given.setdefault("pooling", PoolingType.NONE)
        least = module.least_bucket_rows if module.buckets() == 1 else 0
        return ManagedEmbeddingConfig(**given, partitions=module.buckets(), least_equal_rows=least)

    @property
    def row_unit(self) -> int:
        """Rows of a bucket: row shards have whole buckets. 1 if row shards become buckets."""
        return 1 if self.least_equal_rows else self.num_embeddings // self.partitions

    @property
    def index_bytes_per_row(self) -> int:
        """Bytes of the owner of a row: its id, whether there is one, and two numbers."""
        return 8 + 1 + 16

    @property
    def edges(self) -> list[int]:
        """The first row of each bucket, and the number of rows."""
        return [self.row_unit * bucket for bucket in range(self.partitions + 1)]
