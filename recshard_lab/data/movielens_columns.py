"""The files of MovieLens 20M and 25M and their columns, under TorchRec's names.

Source: the data sets' README, https://files.grouplens.org/datasets/movielens/ml-25m-README.html
"""

RATINGS_FILENAME = "ratings.csv"
MOVIES_FILENAME = "movies.csv"

DEFAULT_RATINGS_COLUMN_NAMES = ["userId", "movieId", "rating", "timestamp"]
DEFAULT_MOVIES_COLUMN_NAMES = ["movieId", "title", "genres"]
