import assert from "node:assert/strict";
import { test } from "node:test";

import exporting, { asksForPlan } from "../../../recshard_lab/lab/widgets/static/export_control.js";
import lines, { moved, rowOfKey } from "../../../recshard_lab/lab/widgets/static/split_lines.js";
import { number, rankFill } from "../../../recshard_lab/lab/widgets/static/surface.js";
import canvas from "../../../recshard_lab/lab/widgets/static/tile_canvas.js";

test("every component renders", () => {
  for (const component of [exporting, lines, canvas]) assert.equal(typeof component.render, "function");
});

test("a split line stays between its neighbours and the edges of the table", () => {
  assert.deepEqual(moved([10, 20, 30], 1, 14.6, 40), [10, 15, 30]);
  assert.deepEqual(moved([10, 20, 30], 1, 99, 40), [10, 30, 30]);
  assert.deepEqual(moved([10, 20, 30], 0, -5, 40), [0, 20, 30]);
  assert.deepEqual(moved([10, 20, 30], 2, 99, 40), [10, 20, 40]);
});

test("keys move a line by 1%, by page 10%, with Shift 0.1% of the rows, and at least one row", () => {
  assert.equal(rowOfKey("ArrowDown", 500, 1000, false), 510);
  assert.equal(rowOfKey("ArrowUp", 500, 1000, true), 499);
  assert.equal(rowOfKey("PageDown", 500, 1000, false), 600);
  assert.equal(rowOfKey("ArrowDown", 3, 19, false), 4);
  assert.equal(rowOfKey("End", 3, 19, false), 19);
  assert.equal(rowOfKey("x", 3, 19, false), undefined);
});

test("the reader chooses a plan only for files that hold one of several", () => {
  const kinds = [["html", ".html, a page", ""], ["json", ".json, a plan", "plan"]];
  assert.equal(asksForPlan(kinds, "json", ["mine", "auto"]), true);
  assert.equal(asksForPlan(kinds, "json", ["mine"]), false);
  assert.equal(asksForPlan(kinds, "html", ["mine", "auto"]), false);
});

test("no two ranks of the first rounds have the same colour and hatching", () => {
  const look = { fills: ["a", "b", "c"], strokes: ["", "/", "x", "."] };
  const seen = [...Array(12).keys()].map(rank => Object.values(rankFill(rank, look)).join());
  assert.equal(new Set(seen).size, 12);
});

test("numbers have thousands separators in every locale", () => assert.equal(number(1234567), "1,234,567"));
