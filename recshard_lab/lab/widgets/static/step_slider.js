function render({ model, el }) {
  const label = document.createElement("label"), name = document.createElement("span");
  const input = document.createElement("input"), output = document.createElement("output");
  input.type = "range"; input.min = 0; input.step = 1;
  label.className = "rs-step-slider"; label.append(name, input, output); el.append(label);
  const show = () => {
    const labels = model.get("labels"), index = model.get("index");
    name.textContent = model.get("description"); label.title = model.get("tooltip");
    input.max = labels.length - 1; input.value = index; output.textContent = labels[index];
    input.setAttribute("aria-label", model.get("description"));
    input.setAttribute("aria-valuetext", labels[index]);
  };
  input.addEventListener("input", () => { model.set("index", Number(input.value)); show(); model.save_changes(); });
  for (const key of ["index", "labels", "description", "tooltip"]) model.on("change:" + key, show);
  show();
}
export default { render };
