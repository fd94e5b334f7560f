"""Measures what steps cost on launched ranks and fits the planner's figures to it.

Read `cases.py` first (what is run), then `steps.py` (how it is timed).
"""
