// Blocks that scroll sideways are reached with Tab, so that the arrow keys scroll them.
addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("pre, article table.docutils"))
    if (block.scrollWidth > block.clientWidth) block.tabIndex = 0;
});
