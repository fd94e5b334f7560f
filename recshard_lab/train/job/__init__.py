"""A training run from a config: ``recshard train --config run.yaml``.

Read first: `config` (the fields of a run), then `run` (how it trains and resumes), `build` (from names to objects).
"""

from recshard_lab.train.job.config import TrainConfig as TrainConfig
from recshard_lab.train.job.config import read_config as read_config
from recshard_lab.train.job.export import export_run as export_run
from recshard_lab.train.job.progress import Reporter as Reporter
from recshard_lab.train.job.run import Trained as Trained
from recshard_lab.train.job.run import TrainingRun as TrainingRun
from recshard_lab.train.job.run import run_training as run_training
from recshard_lab.train.job.trained import TrainedModel as TrainedModel
from recshard_lab.train.job.trained import load_trained as load_trained

__all__ = [
    "Reporter",
    "TrainConfig",
    "Trained",
    "TrainedModel",
    "TrainingRun",
    "export_run",
    "load_trained",
    "read_config",
    "run_training",
]
