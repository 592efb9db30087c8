// A layered drawing. In: how many nodes, for each its arguments (smaller numbers, or it is a cycle and the edge goes back), its
// width. Out: places. Layers by longest path, leaves just above their first user; order by barycentres; across by least squares
// with the order kept (pool adjacent violators), so that straight things stay straight.
const ROW = 64, NODE_HEIGHT = 36, GAP = 18, LONG = 26;

function layers(count, args, isLeaf) {
  const rank = new Array(count).fill(0);
  const first = new Array(count).fill(Infinity);
  for (let i = 0; i < count; i++) for (const a of args[i]) if (a < i) rank[i] = Math.max(rank[i], rank[a] + 1);
  for (let i = count - 1; i >= 0; i--) {
    if (isLeaf(i) && first[i] < Infinity) rank[i] = first[i] - 1;
    for (const a of args[i]) if (a < i) first[a] = Math.min(first[a], rank[i]);
  }
  const least = rank.reduce((m, r) => Math.min(m, r), 0);
  return rank.map(r => r - least);
}

// Cells: nodes, and for edges over several layers one cell without width in each layer between.
function cells(count, args, rank, width) {
  const all = [];
  for (let i = 0; i < count; i++) all.push({ rank: rank[i], width: width[i], up: [], down: [], x: 0 });
  const edges = [];
  const join = (a, b) => { all[a].down.push(b); all[b].up.push(a); };
  for (let i = 0; i < count; i++) {
    // Of several values from one node to another one edge.
    const from = [...new Set(args[i])];
    from.forEach((a, slot) => {
      const edge = { from: a, to: i, slot, of: from.length, via: [] };
      edges.push(edge);
      if (a >= i || rank[a] >= rank[i]) { edge.back = true; return; }
      const span = rank[i] - rank[a];
      if (span > LONG) { edge.long = true; return; }
      let at = a;
      for (let r = rank[a] + 1; r < rank[i]; r++) {
        all.push({ rank: r, width: 6, up: [], down: [], x: 0, bend: true });
        join(at, all.length - 1);
        at = all.length - 1;
        edge.via.push(at);
      }
      join(at, i);
    });
  }
  return { all, edges };
}

function order(all, rows) {
  const place = () => rows.forEach(row => row.forEach((c, n) => { all[c].n = n; }));
  place();
  for (let sweep = 0; sweep < 10; sweep++) {
    const down = sweep % 2 === 0;
    const ordered = down ? rows : [...rows].reverse();
    for (const row of ordered) {
      const key = new Map(row.map(c => {
        const near = down ? all[c].up : all[c].down;
        return [c, near.length ? near.reduce((s, o) => s + all[o].n, 0) / near.length : all[c].n];
      }));
      row.sort((a, b) => key.get(a) - key.get(b) || all[a].n - all[b].n);
      row.forEach((c, n) => { all[c].n = n; });
    }
  }
}

// Centres nearest to `want` (by squares, weighted) that keep the row's order and gaps.
function settle(all, row, want, weight) {
  const blocks = [];
  let offset = 0;
  row.forEach((c, n) => {
    if (n > 0) offset += (all[row[n - 1]].width + all[c].width) / 2 + GAP;
    all[c].offset = offset;
    let block = { sum: weight(c) * (want(c) - offset), weight: weight(c), count: 1 };
    while (blocks.length && blocks[blocks.length - 1].sum / blocks[blocks.length - 1].weight > block.sum / block.weight) {
      const last = blocks.pop();
      block = { sum: last.sum + block.sum, weight: last.weight + block.weight, count: last.count + block.count };
    }
    blocks.push(block);
  });
  let at = 0;
  for (const block of blocks) {
    for (let k = 0; k < block.count; k++, at++) all[row[at]].x = block.sum / block.weight + all[row[at]].offset;
  }
}

function across(all, rows) {
  rows.forEach(row => settle(all, row, () => 0, () => 1));
  const mean = near => near.reduce((s, o) => s + all[o].x, 0) / near.length;
  for (let sweep = 0; sweep < 14; sweep++) {
    const down = sweep % 2 === 0;
    const last = sweep >= 12;
    for (const row of down ? rows : [...rows].reverse()) {
      const near = c => last ? [...all[c].up, ...all[c].down] : down ? all[c].up : all[c].down;
      // Bends and nodes with one neighbour pull harder: long edges and chains become straight.
      settle(all, row, c => near(c).length ? mean(near(c)) : all[c].x,
        c => !near(c).length ? 0.05 : all[c].bend ? 4 : near(c).length === 1 ? 2 : 1);
    }
  }
}

// Places of nodes (`x` centre, `y` top) and the points of edges.
function layout(count, args, width, isLeaf) {
  const rank = layers(count, args, isLeaf);
  const { all, edges } = cells(count, args, rank, width);
  const rows = Array.from({ length: Math.max(0, ...rank) + 1 }, () => []);
  all.forEach((cell, c) => rows[cell.rank].push(c));
  order(all, rows);
  across(all, rows);
  const left = all.reduce((m, c) => Math.min(m, c.x - c.width / 2), Infinity);
  const right = all.reduce((m, c) => Math.max(m, c.x + c.width / 2), -Infinity);
  const nodes = [];
  for (let i = 0; i < count; i++) {
    nodes.push({ x: all[i].x - left, y: all[i].rank * ROW, width: all[i].width, rank: all[i].rank });
  }
  for (const edge of edges) edge.points = edge.via.map(c => [all[c].x - left, all[c].rank * ROW + NODE_HEIGHT / 2]);
  return { nodes, edges, width: right - left, height: rows.length * ROW - (ROW - NODE_HEIGHT) };
}
