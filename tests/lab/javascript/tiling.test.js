import assert from "node:assert/strict";
import { test } from "node:test";

import { added, between, halved, neighbour, snapped, stretched, visible, without }
  from "../../../recshard_lab/lab/widgets/static/tiling.js";

const SIZE = { rows: 100, cols: 16, rowStep: 5, colStep: 4, overwrites: true };
const area = tiles => tiles.reduce((sum, [, r0, r1, c0, c1]) => sum + (r1 - r0) * (c1 - c0), 0);

test("a coordinate snaps to the grid, and near the end to the end", () => {
  assert.equal(snapped(12, 5, 100), 10);
  assert.equal(snapped(13, 5, 100), 15);
  assert.equal(snapped(101, 7, 103), 103);
  assert.equal(snapped(250, 5, 100), 100);
});

test("a rectangle has ascending corners", () => assert.deepEqual(between([9, 2], [3, 7]), [3, 9, 2, 7]));

test("a hole in the middle leaves four tiles of the same rank and the rest of the area", () => {
  const left = without([2, 0, 100, 0, 16], [40, 60, 4, 12]);
  assert.deepEqual(left, [[2, 0, 40, 0, 16], [2, 60, 100, 0, 16], [2, 40, 60, 0, 4], [2, 40, 60, 12, 16]]);
  assert.equal(area(left), 1600 - 160);
  assert.deepEqual(without([2, 0, 100, 0, 16], [0, 100, 16, 20]), [[2, 0, 100, 0, 16]]);
  assert.deepEqual(without([2, 10, 20, 0, 16], [0, 100, 0, 16]), []);
});

test("a new tile overwrites what it covers, or lies on top", () => {
  const tiles = [[0, 0, 100, 0, 16]];
  assert.deepEqual(added(tiles, 1, [50, 100, 0, 16], true), [[0, 0, 50, 0, 16], [1, 50, 100, 0, 16]]);
  assert.deepEqual(added(tiles, 1, [50, 100, 0, 16], false), [[0, 0, 100, 0, 16], [1, 50, 100, 0, 16]]);
});

test("the visible part of a tile is the largest that no later tile covers", () => {
  const tiles = [[0, 0, 100, 0, 16], [1, 0, 30, 0, 16], [2, 30, 100, 0, 4]];
  assert.deepEqual(visible(tiles, 0), [30, 100, 4, 16]);
  assert.deepEqual(visible(tiles, 1), [0, 30, 0, 16]);
  assert.equal(visible([[0, 0, 9, 0, 9], [1, 0, 9, 0, 9]], 0), null);
});

test("arrows go to the nearest tile in their direction, and stay at the edge", () => {
  const tiles = [[0, 0, 50, 0, 8], [1, 50, 100, 0, 8], [2, 0, 50, 8, 16]];
  const middle = ([, r0, r1, c0, c1]) => [(r0 + r1) / 2, 6 * (c0 + c1) / 2];
  assert.equal(neighbour(tiles, 0, [1, 0], middle), 1);
  assert.equal(neighbour(tiles, 0, [0, 1], middle), 2);
  assert.equal(neighbour(tiles, 0, [-1, 0], middle), 0);
});

test("an edge that moves takes the adjacent tile with it, and the area stays", () => {
  const tiles = [[0, 0, 50, 0, 16], [1, 50, 100, 0, 16]];
  for (const [way, end] of [[[1, 0], 55], [[-1, 0], 45]]) {
    const { tiles: next, chosen } = stretched(tiles, 0, way, SIZE);
    assert.deepEqual(next, [[0, 0, end, 0, 16], [1, end, 100, 0, 16]]);
    assert.equal(chosen, 0);
  }
  assert.deepEqual(stretched(tiles, 0, [0, -1], SIZE).tiles[0], [0, 0, 50, 0, 12]);
  assert.equal(stretched(tiles, 1, [1, 0], SIZE), null);
  assert.deepEqual(stretched(tiles, 0, [1, 0], { ...SIZE, overwrites: false }).tiles[1], tiles[1]);
});

test("a tile that is swallowed moves the index of the chosen one", () => {
  const { tiles, chosen } = stretched([[1, 50, 55, 0, 16], [0, 0, 50, 0, 16], [2, 55, 100, 0, 16]], 1, [1, 0], SIZE);
  assert.deepEqual(tiles, [[0, 0, 55, 0, 16], [2, 55, 100, 0, 16]]);
  assert.equal(chosen, 0);
});

test("a tile is split at the grid line nearest to its middle; one row is not", () => {
  assert.deepEqual(halved([[0, 0, 90, 0, 16]], 0, 2, 20, 3), [[0, 0, 40, 0, 16], [3, 40, 90, 0, 16]]);
  assert.deepEqual(halved([[0, 0, 90, 0, 2]], 0, 4, 4, 1), [[0, 0, 90, 0, 1], [1, 0, 90, 1, 2]]);
  assert.equal(halved([[0, 4, 5, 0, 16]], 0, 2, 5, 1), null);
});
