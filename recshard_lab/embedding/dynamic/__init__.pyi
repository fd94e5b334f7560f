# The names of this package, with their types; `__init__.py` loads each when it is first used.

from .collections import DynamicEmbeddingBagCollection as DynamicEmbeddingBagCollection
from .collections import DynamicEmbeddingCollection as DynamicEmbeddingCollection
from .config import DynamicEmbeddingConfig as DynamicEmbeddingConfig
from .config import EmulatedCost as EmulatedCost
from .config import Tier as Tier
from .index import ScoredIndex as ScoredIndex
from .table import DynamicTable as DynamicTable
from .vocabulary import (
    VocabularyEmbeddingBagCollection as VocabularyEmbeddingBagCollection,
)
from .vocabulary import VocabularyEmbeddingCollection as VocabularyEmbeddingCollection
from .vocabulary import export_static as export_static
