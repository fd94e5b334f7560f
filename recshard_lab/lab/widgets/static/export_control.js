const TRAITS = ["kinds", "kind", "plans", "plan", "busy", "message", "failed", "python"];

// Whether the reader must choose a plan: the file holds one plan and there are several.
export const asksForPlan = (kinds, kind, plans) =>
  plans.length > 1 && kinds.some(([name, , needs]) => name === kind && needs === "plan");

function render({ model, el }) {
  const make = (tag, words, parent) => {
    const node = document.createElement(tag);
    if (words) node.textContent = words;
    if (parent) parent.append(node);
    return node;
  };
  const box = make("div", "", el), line = make("div", "", box);
  box.className = "rs-export";
  const menu = (words, trait, name) => {
    const label = make("label", words + " ", line), select = make("select", "", label);
    select.setAttribute("aria-label", name || words);
    select.addEventListener("change", () => { model.set(trait, select.value); model.save_changes(); show(); });
    return [label, select];
  };
  const [, kinds] = menu("Export as", "kind"), [planLabel, plans] = menu("Plan", "plan", "Plan to export");
  const button = make("button", "Export", line), message = make("span", "", line), code = make("code", "", line);
  button.type = "button"; button.title = "write the file beside the notebook and download it";
  message.setAttribute("role", "status");
  for (const control of [kinds, plans, button]) control.setAttribute("data-lm-suppress-shortcuts", "true");
  button.addEventListener("click", () => model.send({ export: kinds.value, plan: plans.value }));
  const fill = (select, options, value) => {
    select.replaceChildren(...options.map(([name, words]) => {
      const option = make("option", words);
      option.value = name;
      return option;
    }));
    select.value = value;
  };
  const show = () => {
    const [offered, kind, names] = ["kinds", "kind", "plans"].map(name => model.get(name));
    fill(kinds, offered, kind);
    fill(plans, names.map(name => [name, name]), model.get("plan"));
    planLabel.hidden = !asksForPlan(offered, kind, names);
    button.setAttribute("aria-disabled", String(model.get("busy")));  // a disabled button would lose the focus
    box.setAttribute("aria-busy", String(model.get("busy")));
    message.textContent = model.get("message"); message.className = model.get("failed") ? "rs-failed" : "";
    code.textContent = model.get("python");
  };
  for (const name of TRAITS) model.on("change:" + name, show);
  model.on("msg:custom", (file, buffers) => {
    const link = make("a", "save again"), old = line.querySelector("a");
    link.href = URL.createObjectURL(new Blob(buffers, { type: file.type }));
    link.download = file.file;
    if (old) { URL.revokeObjectURL(old.href); old.remove(); }
    line.append(link);
    link.click();
  });
  show();
}
export default { render };
