function render({ model, el }) {
  const button = document.createElement("button"), input = document.createElement("input");
  button.type = "button"; button.className = "rs-file-button jupyter-button"; input.type = "file"; input.hidden = true;
  button.setAttribute("data-lm-suppress-shortcuts", "true");
  el.append(button, input);
  const show = () => {
    button.textContent = model.get("description"); button.title = model.get("tooltip");
    button.disabled = model.get("disabled"); input.accept = model.get("accept");
  };
  button.addEventListener("click", () => input.click());
  input.addEventListener("change", async () => {
    const file = input.files[0];
    if (file) model.send({ name: file.name, text: await file.text() });
    input.value = "";  // so that the same file can be chosen again
  });
  for (const key of ["description", "tooltip", "disabled", "accept"]) model.on("change:" + key, show);
  show();
}
export default { render };
