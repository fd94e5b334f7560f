"""`recshard demo`: one model, trained unsharded and under several plans.

- `experiment.py`: one training
- `training.py`: all of them, compared
- `page.py`: the report
"""
