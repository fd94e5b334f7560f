"""Candidate indexes over item vectors, and retrieve-then-rank models.

Read in this order: `index` (the interface), `exact`, `faiss_index`, `loading`, `items` (from a trained TwoTower to an
index), `two_stage` (retrieve, then rank), `evaluation`.
"""

from recshard_lab.serving.retrieval.evaluation import TradeOff as TradeOff
from recshard_lab.serving.retrieval.evaluation import recall_of as recall_of
from recshard_lab.serving.retrieval.evaluation import recall_of_clicks as recall_of_clicks
from recshard_lab.serving.retrieval.evaluation import trade_offs as trade_offs
from recshard_lab.serving.retrieval.exact import ExactIndex as ExactIndex
from recshard_lab.serving.retrieval.faiss_index import FaissIndex as FaissIndex
from recshard_lab.serving.retrieval.index import CandidateIndex as CandidateIndex
from recshard_lab.serving.retrieval.index import Found as Found
from recshard_lab.serving.retrieval.index import IndexFolderError as IndexFolderError
from recshard_lab.serving.retrieval.index import IndexInfo as IndexInfo
from recshard_lab.serving.retrieval.items import ItemFeatures as ItemFeatures
from recshard_lab.serving.retrieval.items import encode_items as encode_items
from recshard_lab.serving.retrieval.items import index_of_items as index_of_items
from recshard_lab.serving.retrieval.loading import load_index as load_index
from recshard_lab.serving.retrieval.two_stage import RetrieveThenRank as RetrieveThenRank
from recshard_lab.serving.retrieval.two_stage import save_retrieval_bundle as save_retrieval_bundle

__all__ = [
    "CandidateIndex",
    "ExactIndex",
    "FaissIndex",
    "Found",
    "IndexFolderError",
    "IndexInfo",
    "ItemFeatures",
    "RetrieveThenRank",
    "TradeOff",
    "encode_items",
    "index_of_items",
    "load_index",
    "recall_of",
    "recall_of_clicks",
    "save_retrieval_bundle",
    "trade_offs",
]
