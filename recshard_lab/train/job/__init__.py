"""A training run from a config: ``recshard train --config run.yaml``.

Read first: `config` (what a run is), then `run` (how it is killed and gone on with), `build` (from names to objects).
"""

from recshard_lab.train.job.config import TrainConfig as TrainConfig
from recshard_lab.train.job.config import read_config as read_config
from recshard_lab.train.job.export import export_run as export_run
from recshard_lab.train.job.run import Trained as Trained
from recshard_lab.train.job.run import TrainingRun as TrainingRun
from recshard_lab.train.job.run import run_training as run_training
from recshard_lab.train.job.trained import TrainedModel as TrainedModel
from recshard_lab.train.job.trained import load_trained as load_trained

__all__ = [
    "TrainConfig",
    "Trained",
    "TrainedModel",
    "TrainingRun",
    "export_run",
    "load_trained",
    "read_config",
    "run_training",
]
