"""Collectives between ranks: who takes part, what was sent, issue and wait."""

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
