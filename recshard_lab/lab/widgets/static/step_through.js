// Plays the frames of recorded steps: one board for each step, one set of controls for all of them.
// The kernel draws the frames. Here they are shown, followed and moved between.

const NS = "http://www.w3.org/2000/svg";
const PLAY_MS = 2600, MOVE_MS = 900, MOST_GHOSTS = 6;

function render({ model, el }) {
  const make = (name, attributes = {}, parent = null, words = "") => {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (words) node.textContent = words;
    if (parent) parent.append(node);
    return node;
  };
  const root = make("div", { class: "rs-step-through" }, el);
  const bar = make("div", { class: "rs-player" }, root);
  const button = (name, hint) => make("button", { type: "button", title: hint, "data-lm-suppress-shortcuts": "true" }, bar, name);
  const previous = button("◀ Previous", "previous stage (arrow left)");
  const play = button("▶ Play", "play or pause (space)");
  const next = button("Next ▶", "next stage (arrow right)");
  const label = make("label", {}, bar, "Follow ");
  const follow = make("select", { "aria-label": "Follow", "data-lm-suppress-shortcuts": "true" }, label);
  const stages = make("ol", { class: "rs-stages", "aria-label": "stages of the step" }, root);
  const told = make("div", { class: "rs-told", role: "status" }, root);
  const boards = make("div", { class: "rs-boards" }, root);
  let shown = -1, timer = 0, sets = [], tabs = [];

  const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
  const count = () => model.get("stages").length;
  const isNarrow = () => {
    const wide = boards.clientWidth || 900, steps = model.get("steps").length;
    return (steps > 1 && wide >= 860 ? wide / 2 : wide) < 640;
  };

  const build = () => {
    follow.replaceChildren();
    make("option", { value: "" }, follow, "nothing");
    for (const [name, key] of model.get("choices")) make("option", { value: key }, follow, name);
    follow.value = model.get("follow");
    stages.replaceChildren();
    tabs = model.get("stages").map((name, i) => {
      const tab = make("button", { type: "button", "data-lm-suppress-shortcuts": "true" }, make("li", {}, stages), `${i + 1} ${name}`);
      tab.addEventListener("click", () => { stop(); go(i); });
      return tab;
    });
    boards.replaceChildren();
    sets = model.get("steps").map(step => {
      const board = make("div", { class: "rs-board", role: "group", tabindex: 0, "data-lm-suppress-shortcuts": "true",
        "aria-label": `${step.name || "the step"}, arrow keys change the stage` }, boards);
      if (step.name) make("h4", {}, board, step.name);
      if (step.about) make("p", {}, board, step.about);
      return { step, board, stage: make("div", { class: "rs-stage" }, board) };
    });
    shown = -1;
    draw(false);
  };

  const mark = () => {
    const key = model.get("follow");
    for (const { stage } of sets)
      for (const piece of stage.querySelectorAll(".rs-piece")) {
        const on = key !== "" && JSON.parse(piece.dataset.follow).includes(key);
        piece.classList.toggle("rs-on", on);
        piece.classList.toggle("rs-off", key !== "" && !on);
      }
    follow.value = key;
    const names = model.get("stages"), choice = model.get("choices").find(([, one]) => one === key);
    told.textContent = `Stage ${shown + 1} of ${names.length}: ${names[shown]}` + (choice ? `, follows ${choice[0]}` : "");
  };

  const boxes = stage => new Map([...stage.querySelectorAll("[data-key]")].map(
    piece => [piece.dataset.key, piece.querySelector(".rs-ring").getBoundingClientRect()]));

  // Moves a piece in from where its origins were in the frame before; further origins are copies that vanish.
  const move = (piece, before, scale) => {
    const here = piece.querySelector(".rs-ring").getBoundingClientRect();
    const from = JSON.parse(piece.dataset.origin).map(key => before.get(key)).filter(Boolean).slice(0, MOST_GHOSTS);
    from.forEach((box, i) => {
      const node = i ? piece.cloneNode(true) : piece;
      if (i) { node.removeAttribute("data-key"); node.setAttribute("aria-hidden", "true"); piece.before(node); }
      const x = (box.x - here.x) / scale, y = (box.y - here.y) / scale;
      const moving = node.animate(
        [{ transform: `translate(${x}px, ${y}px)`, opacity: .55 }, { transform: "none", opacity: 1 }],
        { duration: MOVE_MS, easing: "cubic-bezier(.3, 0, .2, 1)" });
      if (i) moving.finished.then(() => node.remove(), () => node.remove());
    });
  };

  const draw = animated => {
    const stage = model.get("stage"), kind = isNarrow() ? "narrow" : "wide";
    const forward = stage === shown + 1;
    root.classList.toggle("rs-narrow", kind === "narrow");
    for (const one of sets) {
      const before = animated && forward && !calm() ? new Map([...(one.boxes || []), ...boxes(one.stage)]) : null;
      one.stage.innerHTML = one.step[kind][stage];
      const svg = one.stage.querySelector("svg");
      const most = Math.max(...one.step[kind].map(text => Number(/viewBox="0 0 [\d.]+ ([\d.]+)"/.exec(text)[1])));
      one.stage.style.minHeight = `${Math.ceil(most * Math.min(1, (one.stage.clientWidth || 1e6) / svg.viewBox.baseVal.width))}px`;
      const after = boxes(one.stage);
      if (before) {
        const top = svg.getBoundingClientRect(), scale = top.width / svg.viewBox.baseVal.width || 1;
        for (const piece of one.stage.querySelectorAll("[data-key]")) move(piece, before, scale);
      }
      one.boxes = after.size ? after : one.boxes;
      for (const piece of one.stage.querySelectorAll(".rs-piece"))
        piece.addEventListener("click", () => {
          const keys = JSON.parse(piece.dataset.follow), now = model.get("follow");
          if (!keys.length) return;
          model.set("follow", keys[(keys.indexOf(now) + 1) % keys.length]); model.save_changes(); });
    }
    shown = stage;
    tabs.forEach((tab, i) => i === stage ? tab.setAttribute("aria-current", "step") : tab.removeAttribute("aria-current"));
    mark();
  };

  const go = stage => { model.set("stage", (stage + count()) % count()); model.save_changes(); };
  const stop = () => { clearInterval(timer); timer = 0; play.textContent = "▶ Play"; };
  const tick = () => {
    if (!el.isConnected) return stop();
    const at = model.get("stage");
    if (at + 1 >= count()) return stop();
    go(at + 1);
  };
  const toggle = () => {
    if (timer) return stop();
    play.textContent = "❚❚ Pause";
    go(model.get("stage") + 1);
    timer = setInterval(tick, PLAY_MS);
  };
  previous.addEventListener("click", () => { stop(); go(model.get("stage") - 1); });
  next.addEventListener("click", () => { stop(); go(model.get("stage") + 1); });
  play.addEventListener("click", toggle);
  follow.addEventListener("change", () => { model.set("follow", follow.value); model.save_changes(); });
  root.addEventListener("keydown", event => {
    const inList = event.target === follow, onButton = event.target.tagName === "BUTTON";
    const act = { ArrowRight: () => { stop(); go(model.get("stage") + 1); }, ArrowLeft: () => { stop(); go(model.get("stage") - 1); },
      Home: () => { stop(); go(0); }, End: () => { stop(); go(count() - 1); }, " ": toggle }[event.key];
    if (!act || inList || (onButton && event.key === " ")) return;
    event.preventDefault(); event.stopPropagation(); act();
  });
  let narrow = null;
  const sized = new ResizeObserver(() => { const now = isNarrow(); if (now !== narrow) { narrow = now; draw(false); } });
  const changes = { "change:stage": () => draw(true), "change:follow": mark, "change:steps": build };
  for (const [name, act] of Object.entries(changes)) model.on(name, act);
  build();
  narrow = isNarrow();
  sized.observe(boards);
  return () => { stop(); sized.disconnect(); for (const [name, act] of Object.entries(changes)) model.off(name, act); };
}
export default { render };
