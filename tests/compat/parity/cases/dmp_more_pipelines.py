"""Arguments of pipelines: each gives the weights and outputs of the plain loop, or is refused."""

from typing import Any

from torchrec.distributed.train_pipeline import (
    TrainPipelineBase,
    TrainPipelineSparseDist,
)

from tests.compat.parity.case import case, raised
from tests.compat.parity.cases.pipelines import parts, trained
from tests.compat.parity.sharded_tables import CPU

PIPELINES = "torchrec.distributed.train_pipeline"
SPARSE = f"{PIPELINES}.TrainPipelineSparseDist"
STAGES = "pipelines call no method of this name, so an override is refused; TorchRec calls it"


@case(SPARSE)
def batches_are_loaded_after_the_forward() -> Any:
    return trained(
        lambda dmp, optimizer: TrainPipelineSparseDist(dmp, optimizer, CPU, enqueue_batch_after_forward=True)
    )


@case(SPARSE)
def batches_are_copied_in_place() -> Any:
    return trained(lambda dmp, optimizer: TrainPipelineSparseDist(dmp, optimizer, CPU, enable_inplace_copy_batch=True))


@case(f"{PIPELINES}.TrainPipelineBase")
def the_plain_pipeline_copies_in_place() -> Any:
    return trained(lambda dmp, optimizer: TrainPipelineBase(dmp, optimizer, CPU, enable_inplace_copy_batch=True))


@case(SPARSE)
def replicas_are_never_averaged() -> Any:
    return trained(
        lambda dmp, optimizer: TrainPipelineSparseDist(
            dmp, optimizer, CPU, dmp_collection_sync_interval_batches=None, pipeline_postproc=False
        ),
        3,
    )


@case(SPARSE)
def inputs_of_exchanges_are_cleared() -> Any:
    return trained(lambda dmp, optimizer: TrainPipelineSparseDist(dmp, optimizer, CPU, clear_data_dist_inputs=True), 3)


@case(SPARSE, differs="refused: torch has deprecated torch.jit.script", ranks=2)
def dense_modules_are_scripted(rank: int) -> Any:
    dmp, optimizer = parts(rank)
    return raised(lambda: TrainPipelineSparseDist(dmp, optimizer, CPU, apply_jit=True))


@case(SPARSE, differs=STAGES)
def a_loader_of_the_user() -> Any:
    def define() -> Any:
        class Mine(TrainPipelineSparseDist[Any, Any]):
            def copy_batch_to_gpu(self, dataloader_iter: Any) -> Any:
                return super().copy_batch_to_gpu(dataloader_iter)

        return Mine

    return raised(define)
