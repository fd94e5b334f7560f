"""Colours of drawn batches: JupyterLab's variables, so that they follow its themes.

Boxes have outlines and empty bags have text, so that nothing depends on colour alone.
"""

STYLE = """<style>
.rsl-jagged { font-size: 13px; color: var(--jp-content-font-color1, #1f1f1f); overflow-x: auto; }
.rsl-jagged table { border-collapse: collapse; margin: 4px 0; font-size: 13px;
  border: 1px solid var(--jp-border-color1, #9e9e9e);
  background: var(--jp-layout-color0, #fff); color: inherit; }
.rsl-jagged caption { caption-side: top; text-align: left; padding: 0 0 6px; white-space: nowrap;
  color: inherit; font-style: normal; }
.rsl-jagged tr, .rsl-jagged tbody tr:nth-child(odd), .rsl-jagged tbody tr:hover { background: none; }
.rsl-jagged.rsl-jagged th, .rsl-jagged.rsl-jagged td { text-align: left; vertical-align: middle; padding: 3px 10px;
  white-space: nowrap; border: 0; color: inherit; max-width: none; }
.rsl-jagged thead th { font-weight: 600; border-bottom: 1px solid var(--jp-border-color1, #9e9e9e); }
.rsl-jagged tbody + tbody { border-top: 1px solid var(--jp-border-color1, #9e9e9e); }
.rsl-jagged.rsl-jagged th[scope="row"] { font-weight: 400; text-align: right; font-variant-numeric: tabular-nums;
  color: var(--jp-content-font-color2, #555); }
.rsl-jagged th.rsl-key { font-weight: 600; }
.rsl-jagged th[scope="rowgroup"] { vertical-align: top; border-right: 1px solid var(--jp-border-color2, #ccc);
  background: var(--jp-layout-color2, #eee); }
.rsl-jagged .rsl-id { display: inline-block; min-width: 1.2em; padding: 0 5px; text-align: center;
  font-family: var(--jp-code-font-family, monospace); line-height: 18px; border-radius: 3px;
  border: 1px solid var(--jp-brand-color1, #1565c0); background: var(--jp-layout-color1, #fff); }
.rsl-jagged .rsl-id small { font-size: 11px; color: var(--jp-content-font-color2, #555); }
.rsl-jagged .rsl-num { font-family: var(--jp-code-font-family, monospace); white-space: pre; }
.rsl-jagged tbody td:last-child { width: 100%; }
.rsl-jagged .rsl-more, .rsl-jagged .rsl-note { font-style: italic;
  color: var(--jp-content-font-color2, #555); }
.rsl-jagged .rsl-note { margin: 2px 0; }
</style>"""
