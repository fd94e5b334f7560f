const NARROW = 560; // pixels
const CONFIG = { displayModeBar: false }; // a drag zooms, a double click resets; files: the widget's Export control
const loaded = (globalThis.recshardPlotly ??= new Map()); // version -> plotly.js, or its promise, of all kernels
const LEFT = new Error("the figure that asked for plotly.js is gone");

/** The figure as this page draws it: the layout for its width, in its ink. */
export function fitted(drawn, width, ink, pageInk) {
  const { data, layout } = JSON.parse(drawn.replaceAll(ink, pageInk));
  const own = (part) => ({ ...part, ...(width < NARROW ? part.meta?.narrow : {}) });
  return { data: data.map(own), layout: { ...own(layout), autosize: true } };
}

function evaluated(code) {
  const module = { exports: {} };
  new Function("module", "exports", "define", code)(module, module.exports);
  return module.exports;
}

/** plotly.js, which the first figure of the page receives from its kernel. `left` rejects when that figure goes. */
async function plotlyOf(model, left) {
  const version = model.get("version");
  while (true) {
    if (!loaded.has(version)) loaded.set(version, Promise.race([received(model), left]));
    try {
      return await loaded.get(version);
    } catch (error) {
      loaded.delete(version);
      if (error !== LEFT || left.done) throw error;
    }
  }
}

function received(model) {
  return new Promise((resolve, reject) => {
    const answer = (content, [buffer]) => {
      if (!content.plotly) return;
      model.off("msg:custom", answer);
      const text = new Blob([buffer]).stream().pipeThrough(new DecompressionStream("gzip"));
      new Response(text).text().then(evaluated).then(resolve, reject);
    };
    model.on("msg:custom", answer);
    model.send({ want: "plotly" });
  });
}

function render({ model, el }) {
  const plot = document.createElement("div");
  el.classList.add("rs-chart-figure");
  el.setAttribute("role", "figure");
  el.append(plot);
  let plotly, waiting = false, drawing = false, seen = "";
  const look = () => `${plot.clientWidth} ${getComputedStyle(el).color}`;
  const draw = async () => {
    waiting = false;
    if (left.done || !plot.clientWidth) return; // the observer below calls again when it has a width
    drawing = true;
    seen = look();
    const drawn = model.get("drawn"), { clientWidth } = plot, { color, fontFamily } = getComputedStyle(el);
    const { data, layout } = fitted(drawn, clientWidth, model.get("ink"), color);
    if (!plot.dataset.drawn) plot.replaceChildren();
    await plotly.react(plot, data, { ...layout, font: { ...layout.font, family: fontFamily } }, CONFIG);
    plot.dataset.drawn = Number(plot.dataset.drawn ?? 0) + 1;
    drawing = false;
    if (drawn !== model.get("drawn") || seen !== look()) ask();
  };
  const fail = (error) => {
    drawing = false;
    model.set("problem", `${error}`);
    model.save_changes();
  };
  const ask = () => {
    if (!plotly || waiting || drawing || !model.get("drawn")) return; // the newest state is drawn at the end
    waiting = true;
    requestAnimationFrame(() => draw().catch(fail));
  };
  const tell = () => {
    el.setAttribute("aria-label", model.get("label"));
    if (!plot.dataset.drawn) plot.innerHTML = model.get("still");
  };
  const other = () => { if (seen !== look()) ask(); };
  const sizes = new ResizeObserver(other), themes = new MutationObserver(other);
  model.on("change:label", tell);
  model.on("change:still", tell);
  model.on("change:drawn", ask);
  tell();
  let leave;
  const left = new Promise((_, reject) => { leave = () => { left.done = true; reject(LEFT); }; });
  left.catch(() => {});
  plotlyOf(model, left).then((found) => {
    if (left.done) return;
    plotly = found;
    ask();
    sizes.observe(el);
    themes.observe(document.body, { attributes: true });
  }).catch((error) => { if (!left.done) fail(error); });
  return () => {
    leave();
    sizes.disconnect();
    themes.disconnect();
    for (const [name, answer] of [["label", tell], ["still", tell], ["drawn", ask]]) model.off(`change:${name}`, answer);
    plotly?.purge(plot);
  };
}
export default { render };
