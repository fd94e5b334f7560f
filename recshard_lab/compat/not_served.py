"""The purpose of TorchRec's other names, and the nearest names here. The first matching pattern is used."""

from __future__ import annotations

import difflib
import re
from functools import lru_cache

from recshard_lab.compat.served import served_modules
from recshard_lab.compat.torchrec_names import PUBLIC

NEAREST: tuple[tuple[str, str, str], ...] = (
    (r".*\.BoundsCheckMode$", "the policy for ids out of range", "out_of_range= of collections and sharders"),
    # pattern over "torchrec.module.name", purpose, nearest here
    (
        r"(?i).*quant(?!izedcomm).*|torchrec\.inference.*",
        "quantized inference",
        "recshard_lab.quantize_embeddings and shard_for_inference",
    ),
    (r".*\.(InferenceStorageReservation|\w*[Ii]nfer\w*)$", "inference", "recshard_lab.shard_for_inference"),
    (
        r"torchrec\.metrics.*",
        "metrics over ranks",
        "recshard_lab.train.metrics: NEMetric, AUCMetric, GAUCMetric, NDCGMetric and others",
    ),
    (
        r"torchrec\.(fx|pt2|inductor).*",
        "tracing for export",
        "torch.fx.symbolic_trace and torch.export: collections trace as they are",
    ),
    (
        r".*\.(HashZch\w*(Module|Scorer)|get_eviction_\w+|get_kernel_from_policy|TrainInputMapper)$",
        "internals of zero-collision hashing",
        "recshard_lab.embedding.HashZchManagedCollisionModule",
    ),
    (
        r"torchrec\.modules\.mc_\w*\.(evict|return_\w+|apply_mc_method_to_jt_dict)$",
        "internals of managed collisions",
        "ManagedCollisionEmbeddingBagCollection",
    ),
    (
        r"torchrec\.distributed\.model_tracker.*",
        "storage of a delta tracker",
        "recshard_lab.distributed.ModelDeltaTracker, and dmp.dump(path, rows=tracker.get_unique_ids())",
    ),
    (
        r".*\.(Managed\w*|Mc[A-Z]\w*|MC[A-Z]\w*|\w*MCH\w*|\w*[zZ]ch\w*)$|torchrec\.modules\.(mc|hash_mc)\w*.*|torchrec\.distributed\.mc_\w*.*",
        "managed collisions of ids",
        "recshard_lab.embedding.ManagedCollisionEmbeddingBagCollection",
    ),
    (
        r".*\.(\w*Eviction\w*|FeatureScore\w*|VirtualTable\w*|KeyValue\w*|\w*SSD\w*|CacheParams|CacheStatistics|\w*CACHING\w*)$",
        "tables in SSD or cached memory",
        "compute_kernel='fused_uvm_caching' with recshard_lab.sharding.CacheParams, or DynamicEmbeddingConfig(tiers=)",
    ),
    (
        r".*\.(\w*Proposer|proposers_to\w*|MAX_PROPOSALS)$|torchrec\.distributed\.planner\.proposers$",
        "searching plans",
        "EmbeddingShardingPlanner(local_search_passes=), or proposers=",
    ),
    (
        r".*\.(\w*Enumerator|PartitionByType|get_partition_by_type|GUARDED\w*)$|torchrec\.distributed\.planner\.enumerators$",
        "listing sharding options",
        "constraints={table: ParameterConstraints(sharding_types=[...])}",
    ),
    (
        r".*\.(\w*Partitioner|OrderedDeviceHardware|ShardingOptionGroup|SortBy)$|torchrec\.distributed\.planner\.partitioners$",
        "placing shards",
        "ParameterConstraints(ranks=[...]) pins a table",
    ),
    (
        r".*\.(\w*Estimator|Perf|PerfModel|calculate_\w*|get_num_poolings|EmbeddingOffloadStats)$|torchrec\.distributed\.planner\.(shard_estimators|estimator).*",
        "predicting costs",
        "recshard_lab.estimate(plan, ...)",
    ),
    (
        r".*\.(\w*Stats|round_to_one_sigfig|MIN_WIDTH|IMBALANCE\w*)$|torchrec\.distributed\.planner\.stats$",
        "reporting on a plan",
        "print(plan.estimate) and plan.show()",
    ),
    (
        r"torchrec\.distributed\.planner\.constants.*|torchrec\.distributed\.planner\.types\.[A-Z_]+$|.*\.(CustomTopologyData|DeviceHardware|\w*Bandwidths?|TopologyFactory|TopologyConfigBase|HardwareConfig)$",
        "bandwidths and sizes of the machine",
        "the arguments of Topology",
    ),
    (r"torchrec\.distributed\.planner.*", "internals of the planner", "EmbeddingShardingPlanner(...).plan(module)"),
    (
        r".*\.\w*(Pipeline|StageOut|SparseDataDist|GradientAccumulation|TorchCompileConfig|CallArgs|ArgInfo|DataLoadingThread)\w*$",
        "overlapping the stages of a step",
        "TrainPipelineSparseDist, or a plain loop",
    ),
    (
        r".*\.(\w*Lookup|\w*BaseEmbedding\w*|\w*EmbeddingSharding\w*|\w*ShardingContext|\w*ModuleContext|\w*CollectionContext|Sharded\w*|Grouped\w*|KJTList|ListOfKJTList|InputDistOutputs|create_sharding_infos\w*|\w*Mixin|\w*MixIn)$|torchrec\.distributed\.(sharding|embedding_lookup|embedding_sharding|embedding_kernel|batched_embedding_kernel|dist_data|comm_ops).*",
        "internals of sharded modules",
        "recshard_lab.distributed.Executor, and register_scheme for a new scheme",
    ),
    (
        r".*\.(DMPCollection\w+|ShardingEnv2D|\w*2D)$",
        "internals of 2D parallel",
        "DMPCollection(...)",
    ),
    (
        r".*\.(\w*Criteo\w*|criteo_\w*)$|torchrec\.datasets\.criteo.*",
        "reading Criteo files",
        "preprocess_criteo, CriteoClicks and BatchLoader of recshard_lab.data",
    ),
    (
        r".*\.(movielens_\w*|DEFAULT_\w*COLUMN_NAMES|COLUMN_TYPE_CASTERS|\w*_FILENAME)$|torchrec\.datasets\.movielens.*",
        "reading MovieLens files",
        "recshard_lab.MovieLens.load(path)",
    ),
    (r"torchrec\.datasets.*", "reading data", "torch.utils.data"),
    (
        r".*\.(DLRM_\w*|InteractionProjectionArch)$",
        "DLRM with other interactions",
        "DLRM (dot products of all pairs) or DLRM_DCN (a cross network)",
    ),
    (
        r"torchrec\.(models|modules)\..*|torchrec\.models",
        "layers and models",
        "torch.nn, EmbeddingBagCollection and EmbeddingCollection",
    ),
    (r"torchrec\.optim\..*", "optimizers", "recshard_lab.optim"),
    (r"torchrec\.(\w+\.)*test_utils.*", "TorchRec's own tests", "recshard_lab.launch(n) for ranks to test on"),
)


def explain(path: str) -> str:
    """Why an import fails: the name, its purpose, and the nearest name here.

    >>> print(explain("torchrec.distributed.planner.enumerators.EmbeddingEnumerator"))
    recshard_lab does not serve torchrec.distributed.planner.enumerators.EmbeddingEnumerator (listing sharding options).
    Nearest here: constraints={table: ParameterConstraints(sharding_types=[...])}
    """
    if (meant := _misspelt(path)) is not None:
        return f"recshard_lab does not serve {path} (did you mean {meant!r}?)"
    for pattern, purpose, nearest in _compiled():
        if pattern.fullmatch(path):
            return f"recshard_lab does not serve {path} ({purpose}). Nearest here: {nearest}"
    return f"recshard_lab does not serve {path}{_elsewhere(path)}"


def _misspelt(path: str) -> str | None:
    """A similar name of the same module, if TorchRec has no name `path`."""
    module, _, name = path.rpartition(".")
    ours = served_modules().get(module, {})
    if not ours or name in PUBLIC.get(module, "").split():
        return None
    return next(iter(difflib.get_close_matches(name, list(ours), n=1, cutoff=0.9)), None)


def _elsewhere(path: str) -> str:
    """The module that serves the name, or a similar name."""
    name = path.rpartition(".")[2]
    modules = [module for module, names in served_modules().items() if name in names]
    if modules:
        return f": it is in {modules[0]}"
    known = {name for names in served_modules().values() for name in names} | set(served_modules())
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ". It has no similar name"


@lru_cache(maxsize=1)
def _compiled() -> list[tuple[re.Pattern[str], str, str]]:
    return [(re.compile(pattern), purpose, nearest) for pattern, purpose, nearest in NEAREST]
