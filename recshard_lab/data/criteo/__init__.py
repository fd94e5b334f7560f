"""The columns of the Criteo click logs, under TorchRec's names: a label, 13 counts and 26 hashed categories.

Source: the data set's description, https://ailab.criteo.com/download-criteo-1tb-click-logs-dataset/ (24 days of logs).
"""

INT_FEATURE_COUNT = 13
CAT_FEATURE_COUNT = 26
DAYS = 24

DEFAULT_LABEL_NAME = "label"
DEFAULT_INT_NAMES = [f"int_{number}" for number in range(INT_FEATURE_COUNT)]
DEFAULT_CAT_NAMES = [f"cat_{number}" for number in range(CAT_FEATURE_COUNT)]
DEFAULT_COLUMN_NAMES = [DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES]
