"""What pictures are drawn with: colours, numbers, SVG, and the `View` that every picture is.

- `view.py`: what a view returns
- `theme.py`: colours, hatchings, numbers
- `svg.py`: SVG
- `rank_columns.py`: one column for each rank
- `sheet.py`: several views as one picture
- `jagged.py`: a jagged batch as HTML
"""
