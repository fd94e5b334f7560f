"""``torchrec.datasets.scripts``: command line programs that prepare Criteo files, as functions of their arguments."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from recshard_lab.compat.datasets.criteo_arrays import BinaryCriteoUtils
from recshard_lab.data.criteo import DAYS


def _parser(text: str, *folders: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text)
    for folder in folders:
        parser.add_argument(f"--{folder}", required=True, help="folder")
    return parser


def npy_main(argv: Sequence[str]) -> None:
    """Converts text files to npy files: ``npy_preproc_criteo``.

    Args:
        argv: ``--input_dir``, ``--output_dir``, and ``--dataset_name`` "criteo_1tb" (files ``day_0`` to ``day_23``,
            the default) or "criteo_kaggle" (``train.txt`` and ``test.txt``).

    Raises:
        FileNotFoundError: a file is missing.
    """
    parser = _parser("Criteo text files to npy files", "input_dir", "output_dir")
    parser.add_argument("--dataset_name", choices=["criteo_1tb", "criteo_kaggle"], default="criteo_1tb")
    options = parser.parse_args(argv)
    kaggle = options.dataset_name == "criteo_kaggle"
    names = ["train.txt", "test.txt"] if kaggle else [f"day_{day}" for day in range(DAYS)]
    for name in names:
        stem = os.path.join(options.output_dir, name.removesuffix(".txt"))
        dense, sparse, labels = (f"{stem}_{part}.npy" for part in ("dense", "sparse", "labels"))
        source = os.path.join(options.input_dir, name)
        BinaryCriteoUtils.tsv_to_npys(source, dense, sparse, labels, options.dataset_name)


def contiguous_main(argv: Sequence[str]) -> None:
    """Numbers categories contiguously: ``contiguous_preproc_criteo``.

    Args:
        argv: ``--input_dir`` with ``day_0_sparse.npy`` to ``day_23_sparse.npy``, ``--output_dir``, and
            ``--frequency_threshold``, 0 by default.

    Raises:
        FileNotFoundError: a file is missing.
    """
    parser = _parser("Criteo categories to contiguous numbers", "input_dir", "output_dir")
    parser.add_argument("--frequency_threshold", type=int, default=0)
    options = parser.parse_args(argv)
    files = [os.path.join(options.input_dir, f"day_{day}_sparse.npy") for day in range(DAYS)]
    BinaryCriteoUtils.sparse_to_contiguous(files, options.output_dir, options.frequency_threshold)


def shuffle_main(argv: Sequence[str]) -> None:
    """Shuffles all days but the last: ``shuffle_preproc_criteo``.

    Args:
        argv: ``--input_dir_labels_and_dense``, ``--input_dir_sparse``, ``--output_dir_shuffled``, and optionally
            ``--output_dir_full_set`` and ``--random_seed``.

    Raises:
        FileNotFoundError: a file is missing.
    """
    folders = ("input_dir_labels_and_dense", "input_dir_sparse", "output_dir_shuffled")
    parser = _parser("Shuffle Criteo npy files", *folders)
    parser.add_argument("--output_dir_full_set")
    parser.add_argument("--random_seed", type=int, default=0)
    options = parser.parse_args(argv)
    rows = {
        day: BinaryCriteoUtils.get_shape_from_npy(
            os.path.join(options.input_dir_labels_and_dense, f"day_{day}_dense.npy")
        )[0]
        for day in range(DAYS - 1)
    }
    BinaryCriteoUtils.shuffle(
        options.input_dir_labels_and_dense,
        options.input_dir_sparse,
        options.output_dir_shuffled,
        rows,
        options.output_dir_full_set,
        random_seed=options.random_seed,
    )
