"""Files: pages, pictures, plans, scripts. `export` writes anything that the lab shows.

- `exportable.py`, `kinds.py`, `exporting.py`: what can be written, the kinds of file, the call
- `report.py`, `page.py`: one HTML file
- `plan_report.py`, `sweep_report.py`: pages about plans and sweeps
- `assumptions.py`: the figures that a prediction uses
"""
