// The graph of one kind after one pass, drawn by layers. Only what is in view is in the document.
const SVG = "http://www.w3.org/2000/svg";
const CHAR = 6.7, WIDEST = 44;
const svg = byId("graph");
const world = document.createElementNS(SVG, "g");
svg.append(world);
const DRAWN = { key: "", at: new Map(), x: 0, y: 0, scale: 1, box: null };
const LAYOUTS = new Map();

function svgEl(name, attributes, ...children) {
  const e = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
  e.append(...children);
  return e;
}
const short = (text, n = WIDEST) => text.length > n ? text.slice(0, n - 1) + "…" : text;

// Lines of a node: its operator with what matters, and its type.
function caption(b, i) {
  const head = b.head(i).replace(/^(binary|unary|compare|reduce) (.*?)kind=(\w+)/, "$3 $2").replace(/-?\d+\.\d{6,}/g, x => String(Number(Number(x).toPrecision(4))))
    .replace(/ +/g, " ").trim();
  const times = b.times(i) > 1 ? ` ×${b.times(i)}` : "";
  return [short(head, WIDEST - times.length) + times, short(b.type(i))];
}

// Which nodes are drawn and what their arguments are then: what is hidden hands its arguments on.
function visible(b, views, leaves) {
  const hidden = i => {
    const op = b.op(i);
    if (op === "part" || (op === "const" && !leaves)) return true;
    if (!views && VIEW.has(op) && !b.results.some(([, at]) => at === i)) return true;
    return !leaves && LEAF.has(op) && b.users[i].length > 0;
  };
  const shown = [], at = new Map();
  for (let i = 0; i < b.count; i++) if (!hidden(i)) { at.set(i, shown.length); shown.push(i); }
  const behind = new Map();
  const through = (i, seen) => {
    if (at.has(i)) return [i];
    if (behind.has(i)) return behind.get(i);
    if (seen.has(i)) return [];
    seen.add(i);
    const found = [...new Set(b.args[i].flatMap(a => through(a, seen)))];
    behind.set(i, found);
    return found;
  };
  const args = shown.map(i => b.args[i].flatMap(a => through(a, new Set())).map(a => at.get(a)));
  return { shown, at, args };
}

function drawing(b) {
  const views = byId("show-views").checked, leaves = byId("show-leaves").checked;
  const key = `${BODIES.indexOf(b)} ${views} ${leaves}`;
  if (!LAYOUTS.has(key)) {
    const v = visible(b, views, leaves);
    const texts = v.shown.map(i => caption(b, i));
    const widths = texts.map(lines => Math.max(...lines.map(l => l.length)) * CHAR + 18);
    // Views of leaves stand with them, near who uses them.
    const leaf = [];
    v.args.forEach((args, n) => leaf.push(args.length === 0 || (VIEW.has(b.op(v.shown[n])) && args.every(a => leaf[a]))));
    LAYOUTS.set(key, { ...v, texts, key, ...layout(v.shown.length, v.args, widths, n => leaf[n]) });
  }
  return LAYOUTS.get(key);
}

// Nodes that the other stage has not got, as often as it has not.
function changed(b, other) {
  const have = new Map();
  const sign = (x, i) => `${x.origin(i)}\n${x.head(i)}\n${x.type(i)}`;
  for (let i = 0; other && i < other.count; i++) have.set(sign(other, i), (have.get(sign(other, i)) || 0) + other.times(i));
  const marks = new Set();
  for (let i = 0; i < b.count; i++) {
    const left = (have.get(sign(b, i)) || 0) - b.times(i);
    have.set(sign(b, i), Math.max(0, left));
    if (left < 0) marks.add(i);
  }
  return marks;
}

function size() {
  const r = svg.getBoundingClientRect();
  return [r.width || 800, r.height || 600];
}

function fit(d) {
  const [w, h] = size();
  DRAWN.scale = Math.min(1.1, (w - 40) / d.width, (h - 40) / d.height);
  // Rather the top at a readable size than all of it too small to read.
  if (DRAWN.scale < 0.45) DRAWN.scale = Math.min(1, Math.max(0.45, (w - 40) / d.width));
  DRAWN.x = w / 2 - d.width / 2 * DRAWN.scale;
  DRAWN.y = d.height * DRAWN.scale < h - 40 ? (h - d.height * DRAWN.scale) / 2 : 20;
  paint();
}

function whole(d) {
  const [w, h] = size();
  DRAWN.scale = Math.min(1.1, (w - 40) / d.width, (h - 40) / d.height);
  DRAWN.x = (w - d.width * DRAWN.scale) / 2;
  DRAWN.y = (h - d.height * DRAWN.scale) / 2;
  paint();
}

function centre(d, n) {
  const [w, h] = size();
  const node = d.nodes[n];
  DRAWN.scale = Math.max(DRAWN.scale, 0.7);
  DRAWN.x = w / 2 - node.x * DRAWN.scale;
  DRAWN.y = h / 2 - (node.y + NODE_HEIGHT / 2) * DRAWN.scale;
  paint();
}

function zoom(factor, x, y) {
  const [w, h] = size();
  const [cx, cy] = [x ?? w / 2, y ?? h / 2];
  const scale = Math.max(0.01, Math.min(4, DRAWN.scale * factor));
  DRAWN.x = cx - (cx - DRAWN.x) * scale / DRAWN.scale;
  DRAWN.y = cy - (cy - DRAWN.y) * scale / DRAWN.scale;
  DRAWN.scale = scale;
  paint();
}

function curve(d, edge) {
  const from = d.nodes[edge.from], to = d.nodes[edge.to], many = edge.of;
  const spread = Math.min(to.width - 20, 16 * (many - 1));
  const end = [to.x + (many > 1 ? spread * (edge.slot / (many - 1) - 0.5) : 0), to.y];
  const points = [[from.x, from.y + NODE_HEIGHT], ...edge.points, end];
  if (edge.back) {
    const side = Math.max(from.x + from.width / 2, to.x + to.width / 2) + 40;
    return `M${from.x} ${from.y + NODE_HEIGHT}C${side} ${from.y + NODE_HEIGHT + 50} ${side} ${to.y - 50} ${end[0]} ${to.y}`;
  }
  let path = `M${points[0][0].toFixed(1)} ${points[0][1]}`;
  for (let i = 1; i < points.length; i++) {
    const [[x0, y0], [x1, y1]] = [points[i - 1], points[i]], bend = Math.min(60, (y1 - y0) / 2);
    path += `C${x0.toFixed(1)} ${y0 + bend} ${x1.toFixed(1)} ${y1 - bend} ${x1.toFixed(1)} ${y1}`;
  }
  return path;
}

// Puts what is in view, and as much again around it, into the document.
function fill(b, d) {
  const [w, h] = size();
  const s = DRAWN.scale;
  const box = { left: (-DRAWN.x - w / 2) / s, right: (-DRAWN.x + w * 1.5) / s, top: (-DRAWN.y - h / 2) / s, bottom: (-DRAWN.y + h * 1.5) / s };
  const inside = n => {
    const { x, y, width } = d.nodes[n];
    return x + width / 2 >= box.left && x - width / 2 <= box.right && y + NODE_HEIGHT >= box.top && y <= box.bottom;
  };
  const chosen = d.at.get(STATE.node), marks = byId("mark-changes").checked ? changed(b, graphOf(STATE.since, STATE.kind)) : null;
  const near = new Set(chosen === undefined ? [] : [chosen]);
  let plain = "", lit = "", faint = "";
  for (const edge of d.edges) {
    const touches = edge.from === chosen || edge.to === chosen;
    if (touches) { near.add(edge.from); near.add(edge.to); }
    const high = Math.min(d.nodes[edge.from].y, d.nodes[edge.to].y), low = Math.max(d.nodes[edge.from].y, d.nodes[edge.to].y);
    if (low + NODE_HEIGHT < box.top || high > box.bottom) continue;
    const path = curve(d, edge);
    if (touches) lit += path;
    else if (edge.back || edge.long) faint += path;
    else plain += path;
  }
  const texts = s > 0.3;
  const nodes = [];
  for (let n = 0; n < d.nodes.length; n++) {
    if (!inside(n)) continue;
    const i = d.shown[n], { x, y, width } = d.nodes[n];
    const kinds = ["node", b.class(i), n === chosen ? "chosen" : near.has(n) ? "near" : "", marks?.has(i) ? "came" : "", marks && !marks.has(i) ? "stayed" : ""];
    const g = svgEl("g", { class: kinds.filter(Boolean).join(" "), transform: `translate(${(x - width / 2).toFixed(1)} ${y})`, "data-node": i,
      role: "button", "aria-label": `${d.texts[n].join(", ")}, ${b.origin(i)}` },
      svgEl("rect", { class: "box", width: width.toFixed(1), height: NODE_HEIGHT, rx: 3 }),
      svgEl("rect", { class: "tag", width: 4, height: NODE_HEIGHT, rx: 1 }));
    if (texts) {
      const head = svgEl("text", { x: 11, y: 15, class: "head" });
      head.textContent = d.texts[n][0];
      const type = svgEl("text", { x: 11, y: 29, class: "type" });
      type.textContent = d.texts[n][1];
      g.append(head, type);
    }
    nodes.push(g);
  }
  world.replaceChildren(svgEl("path", { class: "edge", d: plain }), svgEl("path", { class: "edge faint", d: faint }),
    ...nodes, svgEl("path", { class: "edge lit", d: lit }));
  DRAWN.box = { ...box, scale: s };
}

let asked = false;
function paint(anew) {
  if (anew) DRAWN.box = null;
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    const b = body();
    if (STATE.tab !== "graph" || !b) return;
    const [w, h] = size(), s = DRAWN.scale, box = DRAWN.box;
    world.setAttribute("transform", `translate(${DRAWN.x.toFixed(2)} ${DRAWN.y.toFixed(2)}) scale(${s.toFixed(4)})`);
    const covered = box && box.left <= -DRAWN.x / s && box.right >= (w - DRAWN.x) / s && box.top <= -DRAWN.y / s
      && box.bottom >= (h - DRAWN.y) / s && box.scale / s < 2.5 && (box.scale > 0.3) === (s > 0.3);
    if (!covered) fill(b, drawing(b));
  });
}

// Along the edges, and sideways within a layer.
function step(key) {
  const b = body(), d = drawing(b), n = d.at.get(STATE.node);
  if (n === undefined) return d.shown[0];
  const byX = list => list.sort((p, q) => Math.abs(d.nodes[p].x - d.nodes[n].x) - Math.abs(d.nodes[q].x - d.nodes[n].x));
  const others = d.nodes.map((_, m) => m).filter(m => m !== n && d.nodes[m].rank === d.nodes[n].rank);
  const to = {
    ArrowUp: () => byX([...d.args[n]])[0],
    ArrowDown: () => byX(d.nodes.map((_, m) => m).filter(m => d.args[m].includes(n)))[0],
    ArrowLeft: () => byX(others.filter(m => d.nodes[m].x < d.nodes[n].x))[0],
    ArrowRight: () => byX(others.filter(m => d.nodes[m].x > d.nodes[n].x))[0],
  }[key]();
  return to === undefined ? null : d.shown[to];
}

VIEWS.graph = {
  draw(before, moved) {
    const b = body();
    svg.toggleAttribute("hidden", !b);
    byId("graph-size").textContent = b ? "" : `there is no ${STATE.kind} after ${program().graphs[STATE.stage].name}`;
    if (!b) return;
    if (moved && (before.kind !== STATE.kind || before.program !== STATE.program)) byId("show-leaves").checked = b.count < 400;
    let d = drawing(b);
    if (STATE.node !== null && !d.at.has(STATE.node)) {
      // What is hidden was asked for: show it.
      byId(VIEW.has(b.op(STATE.node)) ? "show-views" : "show-leaves").checked = true;
      d = drawing(b);
      if (!d.at.has(STATE.node)) { byId("show-views").checked = byId("show-leaves").checked = true; d = drawing(b); }
    }
    byId("graph-size").textContent = `${d.shown.length} of ${b.count} nodes`;
    paint(true);
    const n = d.at.get(STATE.node);
    const key = `${STATE.program} ${d.key}`;
    if (n !== undefined && (STATE.node !== before.node || moved)) {
      const [w, h] = size(), node = d.nodes[n], x = node.x * DRAWN.scale + DRAWN.x, y = node.y * DRAWN.scale + DRAWN.y;
      const away = x < 40 || x > w - 40 || y < 30 || y > h - 60 || DRAWN.key !== key || DRAWN.scale < 0.4;
      if (away) centre(d, n);
    } else if (DRAWN.key !== key) fit(d);
    DRAWN.key = key;
  },
};

function listenToGraph() {
  let drag = null;
  svg.addEventListener("pointerdown", e => { drag = { x: e.clientX, y: e.clientY, moved: false }; });
  svg.addEventListener("pointermove", e => {
    if (!drag || !(e.buttons & 1)) return;
    if (!drag.moved && Math.hypot(e.clientX - drag.x, e.clientY - drag.y) < 4) return;
    if (!drag.moved) svg.setPointerCapture(e.pointerId);
    drag.moved = true;
    DRAWN.x += e.clientX - drag.x;
    DRAWN.y += e.clientY - drag.y;
    Object.assign(drag, { x: e.clientX, y: e.clientY });
    paint();
  });
  svg.addEventListener("click", e => {
    if (drag?.moved) return;
    const g = e.target.closest("[data-node]");
    show({ node: g ? Number(g.dataset.node) : null, step: null });
  });
  svg.addEventListener("dblclick", e => {
    const g = e.target.closest("[data-node]");
    const called = g && body().head(Number(g.dataset.node)).match(/^call block=(.*)$/)?.[1];
    if (program().kinds.includes(called)) show({ kind: called });
  });
  svg.addEventListener("wheel", e => {
    e.preventDefault();
    const r = svg.getBoundingClientRect();
    if (e.shiftKey) { DRAWN.x -= e.deltaY; paint(); } else zoom(Math.exp(-e.deltaY * (e.deltaMode ? 0.05 : 0.0015)), e.clientX - r.left, e.clientY - r.top);
  }, { passive: false });
  svg.addEventListener("keydown", e => {
    const act = { "+": () => zoom(1.25), "=": () => zoom(1.25), "-": () => zoom(0.8), 0: () => whole(drawing(body())) }[e.key];
    if (act) act();
    else if (e.key.startsWith("Arrow")) {
      const to = step(e.key);
      if (to !== null) show({ node: to, step: null });
    } else return;
    e.preventDefault();
  });
  byId("zoom-in").addEventListener("click", () => zoom(1.25));
  byId("zoom-out").addEventListener("click", () => zoom(0.8));
  byId("zoom-fit").addEventListener("click", () => whole(drawing(body())));
  for (const id of ["show-views", "show-leaves"]) byId(id).addEventListener("change", () => {
    const d = drawing(body());
    show(d.at.has(STATE.node) ? {} : { node: null });
  });
  byId("mark-changes").addEventListener("change", () => show({}));
  byId("since").addEventListener("change", e => { byId("mark-changes").checked = true; show({ since: Number(e.target.value) }); });
  new ResizeObserver(() => paint(true)).observe(svg);
}
