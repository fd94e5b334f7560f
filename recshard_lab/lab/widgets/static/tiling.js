// Geometry of drawn shards, without a page. A tile is [rank, r0, r1, c0, c1], half open; a rectangle is [r0, r1, c0, c1].

// A coordinate on the grid; the last half step before the end snaps to the end.
export const snapped = (value, step, end) =>
  value > end - step / 2 ? end : Math.min(end, Math.round(value / step) * step);

// The rectangle between two corners [row, column].
export const between = ([r0, c0], [r1, c1]) => [Math.min(r0, r1), Math.max(r0, r1), Math.min(c0, c1), Math.max(c0, c1)];

// A tile without a rectangle: up to four tiles.
export function without([rank, r0, r1, c0, c1], [a0, a1, b0, b1]) {
  if (a0 >= r1 || a1 <= r0 || b0 >= c1 || b1 <= c0) return [[rank, r0, r1, c0, c1]];
  const m0 = Math.max(r0, a0), m1 = Math.min(r1, a1);
  return [[rank, r0, a0, c0, c1], [rank, a1, r1, c0, c1], [rank, m0, m1, c0, b0], [rank, m0, m1, b1, c1]]
    .filter(([, p0, p1, q0, q1]) => p0 < p1 && q0 < q1);
}

// Adds a rectangle as a tile of `rank`; with `overwrites`, what it covers is cut out of the other tiles.
export const added = (tiles, rank, rectangle, overwrites) =>
  [...(overwrites ? tiles.flatMap(tile => without(tile, rectangle)) : tiles), [rank, ...rectangle]];

// The largest rectangle of tile i that no later tile covers; null if there is none.
export function visible(tiles, i) {
  const parts = tiles.slice(i + 1).reduce((left, [, ...over]) => left.flatMap(part => without(part, over)), [tiles[i]]);
  const area = ([, r0, r1, c0, c1]) => (r1 - r0) * (c1 - c0);
  return parts.length ? parts.reduce((a, b) => (area(b) > area(a) ? b : a)).slice(1) : null;
}

// The tile next to tile i in a direction [down, right]; i if there is none. `middle` returns a tile's centre [y, x].
export function neighbour(tiles, i, [down, right], middle) {
  const [y, x] = middle(tiles[i]);
  let nearest = i, least = Infinity;
  tiles.forEach((tile, j) => {
    const dy = middle(tile)[0] - y, dx = middle(tile)[1] - x, along = dy * down + dx * right;
    const cost = along + 2 * Math.abs(dy * right) + 2 * Math.abs(dx * down);
    if (j !== i && along > 1 && cost < least) { nearest = j; least = cost; }
  });
  return nearest;
}

// Moves the lower or right edge of tile i by one step; with `overwrites`, adjacent tiles follow or are cut.
// Returns the tiles and the new index of tile i; null if the edge cannot move.
export function stretched(tiles, i, [down, right], { rows, cols, rowStep, colStep, overwrites }) {
  const edge = down ? 2 : 4, near = edge - 1, other = down ? [3, 4] : [1, 2], mine = [...tiles[i]];
  const step = (down ? rowStep : colStep) * (down + right), from = mine[edge];
  const to = Math.min(down ? rows : cols, Math.max(mine[near] + 1, from + step));
  if (to === from) return null;
  mine[edge] = to;
  const strip = down ? [from, to, mine[3], mine[4]] : [mine[1], mine[2], from, to], next = [];
  let chosen = i;
  tiles.forEach((tile, j) => {
    const follows = tile[near] === from && tile[other[0]] >= mine[other[0]] && tile[other[1]] <= mine[other[1]];
    if (j === i) { chosen = next.length; next.push(mine); }
    else if (!overwrites) next.push(tile);
    else if (to > from) next.push(...without(tile, strip));
    else next.push(follows ? tile.map((n, k) => (k === near ? to : n)) : tile);
  });
  return { tiles: next, chosen };
}

// Splits tile i in two at the grid line nearest to its middle; the second half is a tile of `rank`.
// `edge` is 2 for rows and 4 for columns. Returns null for a tile of one row or column.
export function halved(tiles, i, edge, step, rank) {
  const low = tiles[i][edge - 1], high = tiles[i][edge];
  if (high - low < 2) return null;
  const middle = Math.min(high - 1, Math.max(low + 1, low + Math.round((high - low) / 2 / step) * step));
  const first = [...tiles[i]], second = [...tiles[i]];
  first[edge] = second[edge - 1] = middle;
  second[0] = rank;
  return [...tiles.slice(0, i), first, second, ...tiles.slice(i + 1)];
}
