"""``torchrec.datasets``."""

SERVED: dict[str, dict[str, str]] = {
    "torchrec.datasets": {},
    "torchrec.datasets.criteo": {
        "data.criteo": "CAT_FEATURE_COUNT DAYS DEFAULT_CAT_NAMES DEFAULT_COLUMN_NAMES DEFAULT_INT_NAMES "
        "DEFAULT_LABEL_NAME INT_FEATURE_COUNT",
        "compat.datasets.criteo": "BinaryCriteoUtils COLUMN_TYPE_CASTERS CriteoIterDataPipe FREQUENCY_THRESHOLD "
        "InMemoryBinaryCriteoIterDataPipe TOTAL_TRAINING_SAMPLES criteo_kaggle criteo_terabyte",
    },
    "torchrec.datasets.movielens": {
        "compat.datasets.movielens": "COLUMN_TYPE_CASTERS DEFAULT_COLUMN_NAMES DEFAULT_MOVIES_COLUMN_NAMES "
        "DEFAULT_RATINGS_COLUMN_NAMES MOVIES_FILENAME RATINGS_FILENAME movielens_20m movielens_25m",
    },
    "torchrec.datasets.random": {"data": "RandomRecDataset"},
    "torchrec.datasets.scripts": {},
    "torchrec.datasets.scripts.contiguous_preproc_criteo": {"compat.datasets.scripts": "main=contiguous_main"},
    "torchrec.datasets.scripts.npy_preproc_criteo": {"compat.datasets.scripts": "main=npy_main"},
    "torchrec.datasets.scripts.shuffle_preproc_criteo": {"compat.datasets.scripts": "main=shuffle_main"},
    "torchrec.datasets.utils": {
        "data": "Batch",
        "compat.datasets.pipes": "LoadFiles PATH_MANAGER_KEY ReadLinesFromCSV safe_cast",
    },
}
