// Keeps JupyterLab's shortcuts away from every control of the widget that contains this one: arrows, Enter, letters.
function render({ el }) {
  el.hidden = true;
  const guard = () => {
    if (!el.isConnected) return requestAnimationFrame(guard);
    const widget = el.closest(".recshard-widget") || el.parentElement;
    widget.addEventListener("focusin", event => event.target.setAttribute("data-lm-suppress-shortcuts", "true"));
  };
  guard();
}
export default { render };
