"""``torchrec.datasets``: readers of Criteo and MovieLens files, and pipes of lines.

In reading order: `pipes` (lines), `criteo` (text files), `criteo_arrays` (npy files and batches), `movielens`,
`scripts` (the command line programs). Paths are local files.
"""
