"""Synthetic ratings, for machines without MovieLens files: planted taste, Zipf popularity.

    stars = thresholds( user bias + movie bias + <taste of the user, character of the movie> + logistic noise )

The taste of a user is part their own and part that of their age band, gender and occupation; the character of a
movie is part its own and part that of its genres. So every feature carries signal, as in the real ratings.

Shape letters: n ratings, U users, M movies, K taste dimensions.
"""

import torch
from torch import Tensor

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.data.formats import AGE_BANDS
from recshard_lab.data.ratings import Column, RatingsDataset
from recshard_lab.sparse import JaggedTensor

_TASTE_DIMS = 4
_NUM_OCCUPATIONS, _NUM_GENRES, _MOST_GENRES = 21, 19, 4
_STAR_SHARES = (0.06, 0.11, 0.28, 0.34, 0.21)  # one to five stars, as in MovieLens 100K
_MOVIE_EXPONENT, _USER_EXPONENT = 0.8, 0.6  # popularity ~ rank ** -exponent
_MOST_PAIRS = 1 << 40
_SECONDS = 215 * 86_400  # the seven months that MovieLens 100K covers


@names_wrong_arguments
class SyntheticRatings(RatingsDataset):
    """Ratings drawn from a planted model, with the features and sizes of MovieLens 100K.

    Args:
        num_ratings, num_users, num_movies: sizes; at most half of all (user, movie) pairs can be rated.
        seed: the same seed gives the same ratings.
        why: added to `source`, e.g. the reason for not using real ratings.

    Attributes:
        planted: the noiseless part of each rating ``[n]``. No model can have a higher AUC.

    Raises:
        ValueError: sizes below 1 or more ratings than half of all pairs.

    >>> SyntheticRatings(1000, num_users=50, num_movies=80).source
    'synthetic ratings, 1,000 drawn from a generator'
    """

    def __init__(
        self,
        num_ratings: int = 100_000,
        num_users: int = 943,
        num_movies: int = 1682,
        seed: int = 0,
        why: str | None = None,
    ) -> None:
        if num_users * num_movies > _MOST_PAIRS:
            raise ValueError(
                f"{num_users:,} users x {num_movies:,} movies: every pair gets a random number, and {_MOST_PAIRS:,} "
                f"pairs are the maximum"
            )
        if min(num_ratings, num_users, num_movies) < 1 or 2 * num_ratings > num_users * num_movies:
            raise ValueError(
                f"{num_ratings:,} ratings of {num_users:,} users and {num_movies:,} movies: sizes must be "
                f"positive, and at most half of all {num_users * num_movies:,} pairs can be rated"
            )
        draw = torch.Generator().manual_seed(seed)
        user, movie = _zipf_pairs(num_ratings, num_users, num_movies, draw)
        profiles = {
            "age": torch.multinomial(torch.ones(len(AGE_BANDS)), num_users, True, generator=draw),
            "gender": torch.multinomial(torch.tensor([0.29, 0.71]), num_users, True, generator=draw),
            "occupation": torch.multinomial(_zipf(_NUM_OCCUPATIONS, _USER_EXPONENT), num_users, True, generator=draw),
        }
        sizes = {"age": len(AGE_BANDS), "gender": 2, "occupation": _NUM_OCCUPATIONS}
        has_genre = _draw_genres(num_movies, draw)

        shared = [torch.randn(sizes[name], _TASTE_DIMS, generator=draw)[ids] for name, ids in profiles.items()]
        taste = torch.stack(shared).sum(0) / 3 + 0.8 * torch.randn(num_users, _TASTE_DIMS, generator=draw)
        of_genre = torch.randn(_NUM_GENRES, _TASTE_DIMS, generator=draw)
        character = has_genre @ of_genre / has_genre.sum(1, keepdim=True)
        character = character + 0.6 * torch.randn(num_movies, _TASTE_DIMS, generator=draw)
        bias = 0.7 * torch.randn(num_users, generator=draw)[user] + torch.randn(num_movies, generator=draw)[movie]
        self.planted: Tensor = bias + 0.5 * (taste[user] * character[movie]).sum(1)

        stars = _stars(self.planted, draw)
        columns: dict[str, Column] = {"user": user, "movie": movie}
        columns |= {name: ids[user] for name, ids in profiles.items()}
        columns["genres"] = _bags_of(has_genre[movie])
        super().__init__(
            columns,
            {"user": num_users, "movie": num_movies, **sizes, "genres": _NUM_GENRES},
            stars >= 4,
            source=f"synthetic ratings, {num_ratings:,} drawn from a generator" + (f" ({why})" if why else ""),
            origin=f"the shipped generator, seed {seed}",
            timestamps=torch.randint(_SECONDS, (num_ratings,), generator=draw),
            names={"age": AGE_BANDS, "gender": ("F", "M")},
        )


def _zipf(size: int, exponent: float) -> Tensor:
    return torch.arange(1, size + 1, dtype=torch.float64) ** -exponent


def _zipf_pairs(count: int, users: int, movies: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Distinct (user, movie) pairs, both sides Zipf distributed; which ids are popular is drawn too."""
    user_weights = _zipf(users, _USER_EXPONENT)[torch.randperm(users, generator=draw)]
    movie_weights = _zipf(movies, _MOVIE_EXPONENT)[torch.randperm(movies, generator=draw)]
    # Gumbel top-k over all pairs is sampling without replacement, with these weights
    noise = -torch.log(-torch.log(torch.rand(users, movies, dtype=torch.float64, generator=draw)))
    keys = user_weights.log()[:, None] + movie_weights.log() + noise
    pairs = keys.flatten().topk(count).indices
    pairs = pairs[torch.randperm(count, generator=draw)]
    return pairs // movies, pairs % movies


def _draw_genres(movies: int, draw: torch.Generator) -> Tensor:
    """Genres of each movie, 1 to 4, the first ids far more common than the last: 0/1 ``[M, genres]``."""
    count = torch.randint(1, _MOST_GENRES + 1, (movies, 1), generator=draw)
    picks = torch.multinomial(_zipf(_NUM_GENRES, _MOVIE_EXPONENT).expand(movies, -1), _MOST_GENRES, generator=draw)
    kept = (torch.arange(_MOST_GENRES) < count).float()
    return torch.zeros(movies, _NUM_GENRES).scatter_(1, picks, kept)


def _stars(planted: Tensor, draw: torch.Generator) -> Tensor:
    uniform = torch.rand(len(planted), generator=draw).clamp(1e-6, 1 - 1e-6)
    noisy = planted + torch.log(uniform / (1 - uniform))
    shares = torch.tensor(_STAR_SHARES).cumsum(0)[:-1]
    thresholds = noisy.sort().values[(shares * len(noisy)).long()]
    return 1 + torch.bucketize(noisy, thresholds, right=True)


def _bags_of(members: Tensor) -> JaggedTensor:
    """The columns that are set in each row, as bags."""
    return JaggedTensor(members.nonzero()[:, 1], lengths=members.sum(1).int())
