"""`recshard demo`: one model, trained unsharded and under several plans.

- `experiment.py`: one training
- `training.py`: all of them, compared
- `command.py`: the command and its report
"""
