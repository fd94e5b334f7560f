"""Charts with axes: one declarative spec, rendered twice.

- `spec.py`: what a chart is: panels, axes, marks, caption
- `static.py`: as SVG, for GitHub, print, screen readers and pages without scripts
- `plotly.py`: as a plotly figure with hover, zoom and selection, which can be updated in place
- `symbols.py`: outlines of markers
"""
