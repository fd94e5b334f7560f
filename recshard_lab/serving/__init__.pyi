# The names of this package, with their types; `__init__.py` loads each when it is first used.

from .bundle import Batch as Batch
from .bundle import BundleError as BundleError
from .bundle import Inputs as Inputs
from .bundle import Servable as Servable
from .bundle import SparseInput as SparseInput
from .bundle import load_bundle as load_bundle
from .bundle import save_bundle as save_bundle
from .bundle import split_answers as split_answers
from .export.refusals import ExportError as ExportError
from .inference import shard_for_inference as shard_for_inference
from .retrieval import ExactIndex as ExactIndex
from .retrieval import FaissIndex as FaissIndex
from .retrieval import ItemFeatures as ItemFeatures
from .retrieval import encode_items as encode_items
from .retrieval import index_of_items as index_of_items
from .retrieval import recall_of_clicks as recall_of_clicks
from .retrieval import save_retrieval_bundle as save_retrieval_bundle
from .retrieval import trade_offs as trade_offs
from .server import Client as Client
from .server import ServeError as ServeError
from .server import Server as Server
from .server import ServerConfig as ServerConfig
from .server import serve as serve
