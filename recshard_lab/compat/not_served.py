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
        r"torchrec\.modules\.embedding_configs\.(\w*EvictionPolicy|FeatureScoreMapping)$",
        "eviction from virtual tables, whose kernels need CUDA",
        "recshard_lab.DynamicEmbeddingConfig(evict=, capacity=, tiers=)",
    ),
    (
        r"torchrec\.modules\.embedding_configs\.data_type_to_sparse_type$",
        "constants for fbgemm's kernels, which are not used here",
        "data_type_to_dtype",
    ),
    (
        r"torchrec\.modules\.fused_embedding_modules\.EmbeddingFusedOptimizer$",
        "the optimizer state of an fbgemm module, which is not used here",
        "fused_optimizer() of FusedEmbeddingBagCollection",
    ),
    (
        r"torchrec\.modules\.utils\.SequenceVBEContext$",
        "what sharded sequence tables pass between their stages",
        "KeyedJaggedTensor(stride_per_key_per_rank=, inverse_indices=)",
    ),
    (
        r"torchrec\.modules\.utils\.make_hash_zch_buckets_non_persistent$",
        "a buffer that HashZchManagedCollisionModule does not have here",
        "load_state_dict, which needs no such buffer",
    ),
    (
        r"torchrec\.quant\.utils\..*|.*\.(get_table_to_weights_from_tbe|assign_weights_to_tbe)$",
        "names and bytes of fbgemm's lookup modules, of which models have none here",
        "the buffers of torchrec.quant.EmbeddingBagCollection",
    ),
    (
        r"torchrec\.distributed\.quant_embeddingbag\..*",
        "parts of sharded quantized collections: one module runs all stages here",
        "torchrec.inference.modules.shard_quant_model, or QuantEmbeddingBagCollectionSharder",
    ),
    (
        r"torchrec\.inference\.(client|dlrm_packager|model_packager|inference_legacy).*|.*\.DLRMPredictFactory$",
        "TorchScript packages for a C++ server",
        "recshard_lab.serving: save_bundle and serve",
    ),
    (
        r"torchrec\.distributed\.(types\.(DMPCollectionConfig|DMPCollectionContext)|.*\.DMPCollection(Config|Context))",
        "sharding groups of several sizes in one model: all collections share one layout of ranks here",
        "DMPCollection(sharding_group_size=)",
    ),
    (
        r".*\.(KeyValueParams|FUSED_PARAM_\w*SSD\w*)",
        "tables in fbgemm's SSD kernels",
        "DynamicEmbeddingConfig(tiers=)",
    ),
    (
        r"torchrec\.distributed\.types\.scope",
        "an annotation of TorchRec's internals that replaces a method by None",
        "torch.profiler.record_function",
    ),
    (
        r"torchrec\.distributed(\.utils)?\.sharded_model_copy",
        "copying process groups, for which TorchRec patches classes of NCCL",
        "dmp.copy(device), or copy.deepcopy of a sharded collection",
    ),
    (
        r".*\.HybridEvalDMP",
        "tables on the CPU and a dense part on a GPU in one evaluation process",
        "recshard_lab.shard_for_inference",
    ),
    (
        r"torchrec\.distributed\.(embeddingbag\.)?(EmbeddingBagSharder|ShardedEmbeddingBag|EmbeddingAwaitable)",
        "sharding a single nn.EmbeddingBag",
        "EmbeddingBagCollection with one table",
    ),
    (
        r".*\.(convert_to_fbgemm_types|emb_opt_type_to_optimizer_class|optimizer_type_to_emb_opt_type|weights_bytes_in_emb_kernel|compute_kernel_to_embedding_location|comm_type_to_sparse_type)",
        "converting to types of fbgemm's kernels, which this library does not need",
        "fused_params={'optimizer': ..., 'learning_rate': ...} of sharders",
    ),
    (
        r"torchrec\.distributed\.train_pipeline\.(\w+\.)?(ArgInfo\w*|CallArgs|Tracer)",
        "rewriting a model: pipelines trace a copy of the graph and rewrite no module",
        "TrainPipelineSparseDist(...).report(), which names the collections whose ids are sent ahead",
    ),
    (
        r"torchrec\.distributed\.train_pipeline\.(\w+\.)?(TrainPipelineContext|\w+PipelineContext)",
        "requests in flight that rewritten modules share: no module is rewritten here",
        "context_type left out",
    ),
    (
        r"torchrec\.distributed\.train_pipeline\.(\w+\.)?TrainPipelineSparseDistCompAutograd",
        "compiled autograd: the backward of a sharded lookup exchanges messages, which no graph captures",
        "compile_dense(model) with TrainPipelineSparseDist",
    ),
    (
        r"torchrec\.distributed\.\w+\.(create_sharding_infos\w*|replace_placement_with_meta_device|pad_vbe_kjt_lengths)",
        "internals of sharded modules: one executor runs all schemes here",
        "recshard_lab.distributed.Executor",
    ),
    (
        r"(?i).*quant(?!izedcomm).*|torchrec\.inference.*",
        "quantized inference",
        "recshard_lab.quantize_embeddings and shard_for_inference",
    ),
    (r".*\.(InferenceStorageReservation|\w*[Ii]nfer\w*)$", "inference", "recshard_lab.shard_for_inference"),
    (
        r"torchrec\.metrics.*",
        "parts of metrics, and their computation in another process",
        "RecMetricModule, and a RecMetric of yours in torchrec.metrics.metric_module.REC_METRICS_MAPPING",
    ),
    (
        r".*(object_pool|tensor_pool|tensor_sharding).*",
        "pools of tensors that samples look up",
        "EmbeddingCollection, whose rows are looked up and sharded",
    ),
    (
        r"torchrec\.(fx|pt2|inductor).*",
        "tracing for export",
        "torch.fx.symbolic_trace and torch.export: collections trace as they are",
    ),
    (
        r"torchrec\.modules\.mc_embedding_modules\.(evict|return_custom_metadata)$",
        "a place for code that TorchRec 1.8 does not have yet: the function has no effect",
        "ManagedCollisionEmbeddingBagCollection, which resets rows that get other ids",
    ),
    (
        r"torchrec\.distributed\.model_tracker.*",
        "tracking raw ids before fbgemm's hash-ZCH remaps them",
        "ModelDeltaTracker, also with records='steps' and dmp.dump(path, rows=)",
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
        r".*\.GUARDED_COMPUTE_KERNELS$",
        "kernels of tables in storage, which recshard_lab does not have",
        "compute_kernel='fused_uvm_caching'",
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
        r"torchrec\.tensor_types\..*",
        "numbers of 2 and 4 bits as tensors",
        "recshard_lab.quantize_embeddings, whose tables hold them packed",
    ),
    (r"torchrec\.datasets.*", "reading data", "torch.utils.data"),
    (
        r"torchrec\.(models|modules)\..*|torchrec\.models",
        "layers and models",
        "torch.nn, EmbeddingBagCollection and EmbeddingCollection",
    ),
    (r"torchrec\.optim\..*", "optimizers", "recshard_lab.optim"),
    (r"torchrec\.(\w+\.)*test_utils.*", "TorchRec's own tests", "recshard_lab.launch(n) for ranks to test on"),
)

PACKAGES: tuple[tuple[str, str, str], ...] = (
    # for public names that no pattern above matches
    (r"torchrec\.distributed\.utils\..*", "helpers of sharded modules", "the methods of DistributedModelParallel"),
    (r"torchrec\.distributed\.comm\..*", "process groups of nodes", "torch.distributed.new_group"),
    (r"torchrec\.distributed\.types\..*", "types of TorchRec's sharding code", "recshard_lab.sharding"),
    (r"torchrec\.distributed(\..*)?", "internals of sharded modules", "recshard_lab.distributed.Executor"),
    (r"torchrec\.sparse\..*", "operators of traced jagged tensors", "KeyedTensor.regroup, and KJTs as pytrees"),
)


def reason_of(path: str) -> tuple[str, str] | None:
    """The purpose of a name that is not served, and the nearest name here. None if TorchRec has no such public name.

    >>> reason_of("torchrec.distributed.model_parallel.HybridEvalDMP")[1]
    'recshard_lab.shard_for_inference'
    """
    module, _, name = path.rpartition(".")
    public = name in PUBLIC.get(module, "").split()
    for pattern, purpose, nearest in [*_compiled(NEAREST), *(_compiled(PACKAGES) if public else ())]:
        if pattern.fullmatch(path):
            return purpose, nearest
    return None


def explain(path: str) -> str:
    """Why an import fails: the name, its purpose, and the nearest name here.

    >>> print(explain("torchrec.distributed.planner.enumerators.GUARDED_COMPUTE_KERNELS"))
    recshard_lab does not serve torchrec.distributed.planner.enumerators.GUARDED_COMPUTE_KERNELS (kernels of tables in
    storage, which recshard_lab does not have). Nearest here: compute_kernel='fused_uvm_caching'
    >>> print(explain("torchrec.distributed.planner.EmbeddingEnumerator"))
    recshard_lab does not serve torchrec.distributed.planner.EmbeddingEnumerator: it is in
    torchrec.distributed.planner.enumerators
    """
    if (meant := _misspelt(path)) is not None:
        return f"recshard_lab does not serve {path} (did you mean {meant!r}?)"
    module, _, name = path.rpartition(".")
    if name not in PUBLIC.get(module, "").split() and any(name in names for names in served_modules().values()):
        return f"recshard_lab does not serve {path}{_elsewhere(path)}"
    if (reason := reason_of(path)) is not None:
        return f"recshard_lab does not serve {path} ({reason[0]}). Nearest here: {reason[1]}"
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


@lru_cache
def _compiled(entries: tuple[tuple[str, str, str], ...]) -> list[tuple[re.Pattern[str], str, str]]:
    return [(re.compile(pattern), purpose, nearest) for pattern, purpose, nearest in entries]
