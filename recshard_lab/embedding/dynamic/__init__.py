"""Tables whose rows are created when an id occurs first, and reused when the id's score is low.

In walking order: `config` says what a table is, `index` finds the slot of an id and decides which id loses its slot
(`index_loops` on CPU, `index_rounds` in torch operators), `admission` decides which ids get a row, and computes it,
`table` keeps the rows, `outside_stores` keeps rows without a slot in slower memories, `collections` looks batches up
and trains, `row_files` writes tables to folders, and `vocabulary` copies them to static tables.
"""

from recshard_lab.embedding.dynamic.collections import DynamicEmbeddingBagCollection as DynamicEmbeddingBagCollection
from recshard_lab.embedding.dynamic.collections import DynamicEmbeddingCollection as DynamicEmbeddingCollection
from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig as DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.config import EmulatedCost as EmulatedCost
from recshard_lab.embedding.dynamic.config import Tier as Tier
from recshard_lab.embedding.dynamic.index import ScoredIndex as ScoredIndex
from recshard_lab.embedding.dynamic.table import DynamicTable as DynamicTable
from recshard_lab.embedding.dynamic.vocabulary import (
    VocabularyEmbeddingBagCollection as VocabularyEmbeddingBagCollection,
)
from recshard_lab.embedding.dynamic.vocabulary import VocabularyEmbeddingCollection as VocabularyEmbeddingCollection
from recshard_lab.embedding.dynamic.vocabulary import export_static as export_static
