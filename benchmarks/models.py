"""Test AUC, NDCG and loss curves of models trained sharded and in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from benchmarks import Figure
from benchmarks.apparatus import sequence_runs
from benchmarks.apparatus.model_runs import Course, Curve, plain, sharded
from benchmarks.apparatus.tower_runs import MOVIELENS, Likes, scores_alone, scores_sharded

RANKS, APART, POINTS = 2, 0.002, 20
TRAIN, TEST, MEMORY = 1 << 17, 1 << 15, 1 << 24
CRITEO = {
    "name": "synthetic-criteo",
    "num_samples": TRAIN,
    "test_samples": TEST,
    "memory_bytes": MEMORY,
}
QUERY = ["user", "age", "gender", "occupation"]

COURSES = {
    "dlrm on MovieLens": Course("dlrm", MOVIELENS),
    "dlrm_dcn on MovieLens": Course("dlrm_dcn", MOVIELENS, {"dcn_num_layers": 2, "dcn_low_rank_dim": 16}),
    "deepfm on MovieLens": Course("deepfm", MOVIELENS, {"deep_layer_sizes": [64, 32]}),
    "two_tower on MovieLens": Course("two_tower", MOVIELENS, {"layer_sizes": [32, 16], "query_tables": QUERY}),
    "dlrm_dcn on planted Criteo": Course(
        "dlrm_dcn", CRITEO, {"dcn_num_layers": 3, "dcn_low_rank_dim": 32}, batch_size=1024, epochs=1
    ),
}


def figures(*, only: Sequence[str] = ()) -> list[Figure]:
    """For each model the difference between its test AUC and plain torch's; then two towers and sequences.

    Args:
        only: parts of names; all when left out.

    Raises:
        ValueError: an `only` that no figure has in its name.
    """
    chosen = {name: course for name, course in COURSES.items() if not only or any(part in name for part in only)}
    others: dict[str, Callable[[], list[Figure]]] = {"proposals": proposals, "sequences": sequences}
    asked = [make for name, make in others.items() if not only or any(part in name for part in only)]
    if not chosen and not asked:
        raise ValueError(f"no figure has {list(only)} in its name; there are: {', '.join([*COURSES, *others])}")
    return loss_curves(chosen) + [figure for make in asked for figure in make()]


def loss_curves(courses: dict[str, Course]) -> list[Figure]:
    """Trains each model twice, sharded on ranks and as its plain twin."""
    from recshard_lab.launcher import launch

    found = []
    for name, course in courses.items():
        truth = plain(course)
        with launch(RANKS) as ranks:
            ours: Curve = ranks.run(sharded, course)[0]
        beside = {
            "AUC sharded": ours.auc,
            "AUC plain torch": truth.auc,
            "loss at the end": _thinned(ours)[-1],
            "loss curve apart": max(abs(a - b) for a, b in zip(_thinned(ours), _thinned(truth), strict=True)),
        }
        if course.data is CRITEO:
            beside["AUC of the planted model"] = _planted()
        found.append(Figure(f"AUC apart, {name}", abs(ours.auc - truth.auc), "", target=APART, beside=beside))
    return found


def _thinned(curve: Curve) -> list[float]:
    """The mean loss over equal stretches."""
    return [float(part.mean()) for part in torch.tensor(curve.losses).tensor_split(POINTS)]


def _planted() -> float:
    from recshard_lab.data import SyntheticClicks

    data = SyntheticClicks(TRAIN + TEST, memory_bytes=MEMORY)
    return data.best(range(TRAIN, TRAIN + TEST)).auc


def proposals(k: int = 100) -> list[Figure]:
    """Two towers trained by the batch's other candidates, on one process and on ranks: held-out likes proposed."""
    from recshard_lab.launcher import launch

    likes = Likes()
    popular = likes.recall(likes.popular(), k)
    alone = likes.recall(scores_alone(True), k)
    with launch(RANKS) as ranks:
        sharded_too = likes.recall(ranks.run(scores_sharded, True)[0], k)
    beside = {
        "one process": alone,
        "not corrected for frequency": likes.recall(scores_alone(False), k),
        "popular movies": popular,
    }
    name = f"recall@{k} of held-out likes, two towers on {RANKS} ranks"
    return [
        Figure(name, sharded_too, "", target=popular, at_most=False, beside=beside),
        Figure("the same, apart from one process", abs(sharded_too - alone), "", target=0.005),
    ]


def sequences() -> list[Figure]:
    """SASRec on MovieLens, the last item of each user held out: NDCG@10 sharded and in plain torch."""
    from recshard_lab.launcher import launch

    course = sequence_runs.Course()
    truth = sequence_runs.plain(course)
    with launch(RANKS) as ranks:
        ours = ranks.run(sequence_runs.sharded, course)[0]
    beside = {"NDCG@10 sharded": ours.ndcg, "NDCG@10 plain torch": truth.ndcg, "loss at the end": ours.losses[-1]}
    name = f"NDCG@10 apart, sasrec sequences on MovieLens, {RANKS} ranks"
    return [Figure(name, abs(ours.ndcg - truth.ndcg), "", target=APART, beside=beside)]
