"""Collectives between ranks: who takes part, what was sent, issue and wait."""

from recshard_lab.comm.codec_formats import Codec as Codec
from recshard_lab.comm.codec_formats import CommType as CommType
from recshard_lab.comm.codecs import CodecError as CodecError
from recshard_lab.comm.codecs import CommOp as CommOp
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
from recshard_lab.comm.collectives import barrier as barrier
from recshard_lab.comm.collectives import broadcast_object as broadcast_object
from recshard_lab.comm.collectives import issue_all_gather as issue_all_gather
from recshard_lab.comm.collectives import issue_all_to_all as issue_all_to_all
from recshard_lab.comm.collectives import issue_reduce_scatter as issue_reduce_scatter
from recshard_lab.comm.emulation import InterNodeLink as InterNodeLink
from recshard_lab.comm.groups import ShardingEnv as ShardingEnv
from recshard_lab.comm.trace import CollectiveEvent as CollectiveEvent
from recshard_lab.comm.trace import Trace as Trace
from recshard_lab.comm.trace import trace as trace
