"""Collectives between ranks. This room knows nothing of embeddings or plans.

In walking order: `env` (which ranks, which backend), `grid` (replicas of a sharded model), `wire` (what carries
messages), `collectives` (issue and wait), `trace` (what was sent); errors of one rank on all ranks: `agreement`,
`errors`, `lost_ranks`; compressed messages: `codecs`.
"""

from recshard_lab.comm.agreement import agreed as agreed
from recshard_lab.comm.agreement import from_first_rank as from_first_rank
from recshard_lab.comm.agreement import gathered as gathered
from recshard_lab.comm.agreement import raise_first_error as raise_first_error
from recshard_lab.comm.agreement import refuse_differences as refuse_differences
from recshard_lab.comm.codecs import Codec as Codec
from recshard_lab.comm.codecs import CodecError as CodecError
from recshard_lab.comm.codecs import CommOp as CommOp
from recshard_lab.comm.codecs import CommType as CommType
from recshard_lab.comm.codecs import QCommsConfig as QCommsConfig
from recshard_lab.comm.codecs import QuantizedCommCodecs as QuantizedCommCodecs
from recshard_lab.comm.codecs import Registry as Registry
from recshard_lab.comm.codecs import codec_error as codec_error
from recshard_lab.comm.codecs import codecs_for as codecs_for
from recshard_lab.comm.codecs import get_qcomm_codecs as get_qcomm_codecs
from recshard_lab.comm.codecs import get_qcomm_codecs_registry as get_qcomm_codecs_registry
from recshard_lab.comm.codecs import make_codec as make_codec
from recshard_lab.comm.collectives import Pending as Pending
from recshard_lab.comm.collectives import all_gather_object as all_gather_object
from recshard_lab.comm.collectives import all_reduce as all_reduce
from recshard_lab.comm.collectives import all_to_all as all_to_all
from recshard_lab.comm.collectives import broadcast as broadcast
from recshard_lab.comm.collectives import broadcast_object as broadcast_object
from recshard_lab.comm.collectives import issue_all_gather as issue_all_gather
from recshard_lab.comm.collectives import issue_all_to_all as issue_all_to_all
from recshard_lab.comm.collectives import issue_reduce_scatter as issue_reduce_scatter
from recshard_lab.comm.collectives import ring_bytes as ring_bytes
from recshard_lab.comm.env import ShardingEnv as ShardingEnv
from recshard_lab.comm.env import backends_of as backends_of
from recshard_lab.comm.env import compute_device as compute_device
from recshard_lab.comm.env import get_local_rank as get_local_rank
from recshard_lab.comm.env import get_local_size as get_local_size
from recshard_lab.comm.env import host_env as host_env
from recshard_lab.comm.env import message_device as message_device
from recshard_lab.comm.env import sizes_env as sizes_env
from recshard_lab.comm.env import times_note as times_note
from recshard_lab.comm.env import uses_nccl as uses_nccl
from recshard_lab.comm.errors import Failed as Failed
from recshard_lab.comm.errors import RankLost as RankLost
from recshard_lab.comm.errors import complete as complete
from recshard_lab.comm.errors import failing_rank as failing_rank
from recshard_lab.comm.errors import num_issued as num_issued
from recshard_lab.comm.errors import raise_after_backward as raise_after_backward
from recshard_lab.comm.grid import ReplicaGrid as ReplicaGrid
from recshard_lab.comm.grid import device_mesh as device_mesh
from recshard_lab.comm.trace import CollectiveEvent as CollectiveEvent
from recshard_lab.comm.trace import Trace as Trace
from recshard_lab.comm.trace import trace as trace
from recshard_lab.comm.wire import LATENCY_VARIABLE as LATENCY_VARIABLE
from recshard_lab.comm.wire import InterNodeLink as InterNodeLink
from recshard_lab.comm.wire import ProcessGroupWire as ProcessGroupWire
