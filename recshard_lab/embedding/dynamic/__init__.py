"""Tables whose rows are created when an id occurs first, and reused when the id's score is low.

In walking order: `config` says what a table is, `index` finds the slot of an id and decides which id loses its slot
(`index_loops` on CPU, `index_rounds` in torch operators), `initial` computes first rows, `admission` decides which ids
get one, `table` keeps the rows, `stores` keeps rows without a slot in slower memories, which `tiers` describes,
`collections` looks batches up and trains, `dumps` writes tables to folders, and `export` copies them to the static
tables of `vocabulary`.
"""

from recshard_lab.embedding.dynamic.collections import DynamicEmbeddingBagCollection as DynamicEmbeddingBagCollection
from recshard_lab.embedding.dynamic.collections import DynamicEmbeddingCollection as DynamicEmbeddingCollection
from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig as DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.export import export_static as export_static
from recshard_lab.embedding.dynamic.index import ScoredIndex as ScoredIndex
from recshard_lab.embedding.dynamic.table import DynamicTable as DynamicTable
from recshard_lab.embedding.dynamic.tiers import EmulatedCost as EmulatedCost
from recshard_lab.embedding.dynamic.tiers import Tier as Tier
from recshard_lab.embedding.dynamic.vocabulary import (
    VocabularyEmbeddingBagCollection as VocabularyEmbeddingBagCollection,
)
from recshard_lab.embedding.dynamic.vocabulary import VocabularyEmbeddingCollection as VocabularyEmbeddingCollection
