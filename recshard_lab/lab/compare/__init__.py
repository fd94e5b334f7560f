"""Plans side by side: predicted, measured on launched ranks, explained. No widget here.

- `question.py`, `question_code.py`: what is planned, and the same as Python
- `plan_comparison.py`: the answers beside each other
- `measure.py`: runs a plan on ranks
- `scaling.py`: the same tables with other skew and sizes
- `formats.py`: number formats of served tables
"""
