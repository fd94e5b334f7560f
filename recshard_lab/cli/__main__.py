"""``python -m recshard_lab.cli``, where the program is not on the path."""

from recshard_lab.cli import main

main()
