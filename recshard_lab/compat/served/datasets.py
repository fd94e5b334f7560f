"""``torchrec.datasets``."""

SERVED: dict[str, dict[str, str]] = {
    "torchrec.datasets": {},
    "torchrec.datasets.criteo": {
        "data.criteo": "CAT_FEATURE_COUNT DAYS DEFAULT_CAT_NAMES DEFAULT_COLUMN_NAMES DEFAULT_INT_NAMES "
        "DEFAULT_LABEL_NAME INT_FEATURE_COUNT",
    },
    "torchrec.datasets.movielens": {
        "data.movielens_columns": "DEFAULT_MOVIES_COLUMN_NAMES DEFAULT_RATINGS_COLUMN_NAMES MOVIES_FILENAME "
        "RATINGS_FILENAME",
    },
    "torchrec.datasets.random": {"data": "RandomRecDataset"},
    "torchrec.datasets.utils": {"data": "Batch"},
}
