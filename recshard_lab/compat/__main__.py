"""``python -m recshard_lab.compat``: how much of TorchRec's names is served, and what comes nearest to the rest."""

from recshard_lab.compat.coverage import report

if __name__ == "__main__":
    print(report())
