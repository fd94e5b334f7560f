"""Answers about plans: why a table is where it is, what would be shorter, and why no plan fits."""
