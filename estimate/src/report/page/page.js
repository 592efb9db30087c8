const DATA = JSON.parse(document.getElementById("data").textContent);
const ROWS = DATA.rows.map(cells => Object.fromEntries(DATA.columns.map((c, i) => [c, cells[i]])));
const byId = id => document.getElementById(id);
const chartOf = id => byId(id).querySelector(".chart");

// --- numbers in words
const trim = x => Number(x.toPrecision(3)).toString();
const scaled = (x, units) => {
  const i = x > 0 ? Math.min(units.length - 1, Math.max(0, Math.floor(Math.log10(x) / 3))) : 0;
  return `${trim(x / 1000 ** i)} ${units[i]}`;
};
const time = s => s >= 1 ? `${trim(s)} s` : s >= 1e-3 ? `${trim(s * 1e3)} ms` : `${trim(s * 1e6)} µs`;
const bytes = n => scaled(n, ["B", "kB", "MB", "GB", "TB", "PB"]);
const flops = n => scaled(n, ["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"]);
const color = i => `var(--c${i % 8})`;

// --- elements
function el(tag, attributes = {}, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  e.append(...children);
  return e;
}
function svg(tag, attributes = {}, text) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  if (text !== undefined) e.textContent = text;
  return e;
}
// A mark that tells what it is to the mouse, the keyboard and a screen reader.
function mark(e, text) {
  e.classList.add("mark");
  e.setAttribute("aria-label", text);
  const show = at => {
    const tip = byId("tip");
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.min(at.x + 12, innerWidth - box.width - 4)}px`;
    tip.style.top = `${Math.min(at.y + 12, innerHeight - box.height - 4)}px`;
  };
  e.addEventListener("mousemove", event => show({ x: event.clientX, y: event.clientY }));
  e.addEventListener("focus", () => show(e.getBoundingClientRect()));
  for (const leave of ["mouseleave", "blur"]) e.addEventListener(leave, () => { byId("tip").hidden = true; });
  return e;
}
function legend(id, names) {
  byId(id).querySelector(".legend").replaceChildren(...names.map((name, i) => el("span", { style: `--of: ${color(i)}` }, name)));
}

// --- charts with two axes
function scale(from, to, [a, b], log) {
  const f = log ? Math.log10 : x => x;
  const [lo, hi] = [f(from), f(to)];
  const at = x => a + (hi > lo ? (f(x) - lo) / (hi - lo) : 0.5) * (b - a);
  const ticks = [];
  if (log) {
    const whole = hi - lo > 2.5 ? [1] : [1, 2, 5];
    for (let p = Math.floor(lo); p <= hi; p++) for (const m of whole) {
      const x = m * 10 ** p;
      if (x >= from * 0.999 && x <= to * 1.001) ticks.push(x);
    }
  } else {
    const rough = (to - from) / 5 || 1, p = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(m => m * p).find(s => s >= rough);
    for (let x = Math.ceil(from / step) * step; x <= to * 1.0001; x += step) ticks.push(x);
  }
  return { at, ticks };
}
function chart(id, { x, y, label, height = 300 }) {
  const width = 560, box = { left: 78, right: 14, top: 8, bottom: 36 };
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label });
  const sx = scale(...x.range, [box.left, width - box.right], x.log), sy = scale(...y.range, [height - box.bottom, box.top], y.log);
  for (const t of sx.ticks) {
    root.append(svg("line", { class: "axis", x1: sx.at(t), x2: sx.at(t), y1: box.top, y2: height - box.bottom }));
    root.append(svg("text", { class: "tick", x: sx.at(t), y: height - box.bottom + 14, "text-anchor": "middle" }, x.show(t)));
  }
  for (const t of sy.ticks) {
    root.append(svg("line", { class: "axis", x1: box.left, x2: width - box.right, y1: sy.at(t), y2: sy.at(t) }));
    root.append(svg("text", { class: "tick", x: box.left - 6, y: sy.at(t) + 4, "text-anchor": "end" }, y.show(t)));
  }
  root.append(svg("text", { x: width - box.right, y: height - 4, "text-anchor": "end" }, x.name));
  root.append(svg("text", { x: 4, y: box.top + 4 }, y.name));
  chartOf(id).append(root);
  return { root, x: sx.at, y: sy.at };
}
const line = (points, attributes) => svg("path", { fill: "none", "stroke-width": 2, ...attributes, d: points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(2)} ${y.toFixed(2)}`).join("") });

function facts() {
  const s = DATA.summary, c = DATA.schedule;
  const what = { decode: ["TPOT", s.tpot_seconds], prefill: ["TTFT", s.ttft_seconds], train: ["step", s.step_seconds] }[c.for];
  byId("title").textContent = `${DATA.model} on ${c.devices} × ${DATA.hardware}`;
  document.title = `astrai estimate: ${DATA.model}`;
  const ranks = ["tp", "dp", "ep", "pp"].filter(k => c[k] > 1).map(k => `${k}=${c[k]}`).join(" ") || "one rank";
  const list = [
    ["parameters", scaled(DATA.parameters, ["", "k", "M", "B", "T"])],
    ["schedule", `${c.for}, ${c.batch} × ${c.seq} tokens, ${c.dtype}, ${ranks}`],
    [what[0], time(what[1])], ["tokens/s", trim(s.tokens_per_s)], ["MFU", `${trim(100 * s.mfu)} %`],
    ["memory", `${bytes(s.memory.total)} of ${bytes(s.device_memory)}, ${s.fits ? "fits" : "does not fit"}`],
  ];
  byId("facts").append(...list.map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v))));
}

// --- where the time goes: a bar an operator of a kind of layer, in what it waits for
const PARTS = ["computing", "memory", "starting", "messages"];
function parts(r) {
  const body = Math.max(r.compute_us, r.memory_us);
  return [r.compute_us >= r.memory_us ? body : 0, r.compute_us >= r.memory_us ? 0 : body, r.fixed_us, r.communication_us];
}
function times() {
  const bars = new Map();
  for (const r of ROWS) {
    const key = `${r.layer ? `${r.layer}: ` : ""}${r.operator}${r.form === "collective" ? " (messages)" : r.program === "update" ? " (update)" : ""}`;
    const bar = bars.get(key) ?? { key, parts: [0, 0, 0, 0], launches: 0 };
    parts(r).forEach((us, i) => { bar.parts[i] += us; });
    bar.launches += r.launches;
    bars.set(key, bar);
  }
  const sum = b => b.parts.reduce((x, y) => x + y, 0);
  let list = [...bars.values()].sort((a, b) => sum(b) - sum(a));
  const all = list.reduce((x, b) => x + sum(b), 0), most = 24;
  if (list.length > most) {
    const rest = list.slice(most - 1);
    const joined = { key: `${rest.length} others`, launches: 0, parts: [0, 1, 2, 3].map(i => rest.reduce((x, b) => x + b.parts[i], 0)) };
    joined.launches = rest.reduce((x, b) => x + b.launches, 0);
    list = [...list.slice(0, most - 1), joined];
  }
  legend("time", PARTS);
  const width = 560, row = 17, left = 230, root = svg("svg", { viewBox: `0 0 ${width} ${list.length * row + 4}`, role: "group", "aria-label": "time by operator" });
  const longest = Math.max(...list.map(sum));
  list.forEach((b, i) => {
    const name = b.key.length > 38 ? `…${b.key.slice(-37)}` : b.key;
    root.append(svg("text", { x: left - 6, y: i * row + 13, "text-anchor": "end" }, name));
    let at = left;
    b.parts.forEach((us, p) => {
      const w = us / longest * (width - left - 50);
      if (w <= 0) return;
      const text = `${b.key}\n${PARTS[p]}: ${time(us / 1e6)}\n${b.launches} launches, ${trim(100 * sum(b) / all)} % of the time`;
      root.append(mark(svg("rect", { x: at, y: i * row + 2, width: w, height: row - 4, fill: color(p), tabindex: 0 }), text));
      at += w;
    });
    root.append(svg("text", { class: "tick", x: at + 4, y: i * row + 13 }, `${trim(100 * sum(b) / all)} %`));
  });
  chartOf("time").append(root);
}

// --- the roofline, with every kernel on it
const FORMS = [...new Set(ROWS.map(r => r.form))];
function roofline() {
  const shown = ROWS.filter(r => r.flops > 0 && r.bytes > 0 && r.total_us > 0);
  const top = Math.max(...DATA.peaks.map(p => p[1]), 1);
  const x = shown.map(r => r.flops / r.bytes), y = shown.map(r => r.flops / r.total_us * 1e6);
  const ridge = top / DATA.bandwidth;
  const range = [Math.min(0.1, ...x) / 1.5, Math.max(ridge * 4, ...x) * 1.5];
  const low = Math.max(Math.min(...y, range[0] * DATA.bandwidth) / 1.5, top / 1e9);
  const c = chart("roofline", {
    label: "roofline", height: 340, x: { range, log: true, name: "operations a byte", show: trim },
    y: { range: [low, top * 2], log: true, name: "", show: flops },
  });
  legend("roofline", FORMS);
  DATA.peaks.forEach(([name, peak]) => {
    const from = Math.max(range[0], low / DATA.bandwidth);
    const points = [[from, from * DATA.bandwidth], [peak / DATA.bandwidth, peak], [range[1], peak]];
    c.root.append(line(points.map(([a, b]) => [c.x(a), c.y(b)]), { stroke: "var(--dim)", "stroke-width": 1.5 }));
    c.root.append(svg("text", { x: c.x(range[1]) - 4, y: c.y(peak) - 4, "text-anchor": "end" }, `${name} ${flops(peak)}`));
  });
  shown.forEach((r, i) => {
    const circle = svg("circle", { cx: c.x(x[i]), cy: c.y(Math.max(y[i], low)), r: 3 + 22 * Math.sqrt(r.share), fill: color(FORMS.indexOf(r.form)), "fill-opacity": 0.6, tabindex: 0 });
    c.root.append(mark(circle, `${r.layer} ${r.operator} (${r.form})\n${flops(y[i])} at ${trim(x[i])} operations a byte\nbound by ${r.bound_by}, ${trim(100 * r.share)} % of the time`));
  });
}

// --- memory and time, launch by launch
function memory() {
  const stage = DATA.stages.reduce((a, b) => Math.max(...a.launches.map(l => l[1]), 0) + a.held >= Math.max(...b.launches.map(l => l[1]), 0) + b.held ? a : b);
  const at = DATA.stages.indexOf(stage), n = stage.launches.length;
  const most = stage.held + Math.max(...stage.launches.map(l => l[1]), 0);
  const c = chart("memory", {
    label: "memory over time", x: { range: [0, Math.max(n, 1)], name: `launches${DATA.stages.length > 1 ? ` of stage ${at}` : ""}`, show: trim },
    y: { range: [0, Math.max(most * 1.1, 1)], name: "", show: bytes },
  });
  const corners = stage.launches.flatMap((l, i) => [[c.x(i), c.y(stage.held + l[1])], [c.x(i + 1), c.y(stage.held + l[1])]]);
  const base = c.y(0), area = [[c.x(0), base], ...corners, [c.x(n), base]];
  c.root.append(mark(line(area, { fill: color(0), "fill-opacity": 0.45, stroke: color(0) }), `at most ${bytes(most)}`));
  const held = [[c.x(0), base], [c.x(0), c.y(stage.held)], [c.x(n), c.y(stage.held)], [c.x(n), base]];
  c.root.append(mark(line(held, { fill: color(1), "fill-opacity": 0.5, stroke: color(1) }), `kept over the step: ${bytes(stage.held)}`));
  c.root.append(svg("text", { x: c.x(0) + 6, y: Math.min(c.y(stage.held) + 14, base - 4) }, `kept over the step: ${bytes(stage.held)}`));
}
function timeline() {
  let first = 0;
  const lanes = DATA.stages.map((stage, i) => {
    const rows = ROWS.filter(r => r.stage === i);
    let now = 0;
    return stage.launches.map(([row]) => {
      const r = rows[row], us = r.total_us / r.launches;
      now += us;
      return { r, at: now - us, us };
    });
  });
  const total = lanes.reduce((sum, lane) => sum + (lane.length ? lane.at(-1).at + lane.at(-1).us : 0), 0) || 1;
  const width = 1160, left = 60, height = 30, root = svg("svg", { viewBox: `0 0 ${width} ${lanes.length * height + 20}`, role: "group", "aria-label": "timeline" });
  legend("timeline", FORMS);
  lanes.forEach((lane, i) => {
    root.append(svg("text", { x: left - 6, y: i * height + 18, "text-anchor": "end" }, lanes.length > 1 ? `stage ${i}` : ""));
    for (const { r, at, us } of lane) {
      const x = left + (first + at) / total * (width - left - 10), w = Math.max(us / total * (width - left - 10), 0.3);
      const rect = svg("rect", { x, y: i * height + 2, width: w, height: height - 6, fill: color(FORMS.indexOf(r.form)) });
      root.append(mark(rect, `${r.program}: ${r.layer} ${r.operator}\n${time(us / 1e6)}, from ${time((first + at) / 1e6)}, bound by ${r.bound_by}`));
    }
    if (lane.length) first += lane.at(-1).at + lane.at(-1).us;
  });
  for (const t of scale(0, total, [left, width - 10]).ticks) {
    root.append(svg("text", { class: "tick", x: left + t / total * (width - left - 10), y: lanes.length * height + 14, "text-anchor": "middle" }, time(t / 1e6)));
  }
  chartOf("timeline").append(root);
  const out = DATA.stages.reduce((sum, s) => sum + s.left_out, 0);
  if (out) chartOf("timeline").append(el("p", { class: "dim" }, `${out} launches more are not drawn.`));
}

function sensitivity() {
  const all = DATA.sensitivity.flatMap(s => s.seconds);
  const c = chart("sensitivity", {
    label: "sensitivity", x: { range: [DATA.factors[0], DATA.factors.at(-1)], log: true, name: "times as fast", show: trim },
    y: { range: [Math.min(...all) * 0.95, Math.max(...all) * 1.05], name: "", show: time },
  });
  legend("sensitivity", DATA.sensitivity.map(s => s.what));
  DATA.sensitivity.forEach((s, i) => {
    const points = s.seconds.map((y, j) => [c.x(DATA.factors[j]), c.y(y)]);
    c.root.append(line(points, { stroke: color(i) }));
    points.forEach(([x, y], j) => c.root.append(mark(svg("circle", { cx: x, cy: y, r: 3.5, fill: color(i), tabindex: 0 }), `${s.what} × ${DATA.factors[j]}: ${time(s.seconds[j])}`)));
  });
}

// Of ranks that were refused whole no more than these is known.
const pieces = s => `, batch ${s.batch}${s.chunk ? `, ${s.chunk} tokens a piece` : ""}${s.for === "train" ? `, ZeRO ${s.zero}, recompute ${s.recompute}${s.interleave > 1 ? `, interleaved ${s.interleave} times` : ""}` : ""}`;
const ranks = s => ["tp", "dp", "ep", "pp"].map(k => `${k}=${s[k]}`).join(" ") + (s.batch === undefined ? "" : pieces(s));
function search() {
  const found = DATA.search;
  if (!found) return;
  byId("search").hidden = false;
  const f = found.frontier;
  const span = of => [Math.min(...f.map(of)) / 1.2, Math.max(...f.map(of)) * 1.2];
  const c = chart("search", {
    label: "frontier", x: { range: span(e => e.step), log: true, name: "step", show: time },
    y: { range: span(e => e.tokens_per_s_per_device), log: true, name: "tokens/s a device", show: trim },
  });
  c.root.append(line(f.map(e => [c.x(e.step), c.y(e.tokens_per_s_per_device)]), { stroke: color(0) }));
  f.forEach((e, i) => {
    const best = i === found.winner;
    const circle = svg("circle", { cx: c.x(e.step), cy: c.y(e.tokens_per_s_per_device), r: best ? 8 : 5, fill: color(best ? 4 : 0), tabindex: 0 });
    c.root.append(mark(circle, `${best ? "best: " : ""}${ranks(e.schedule)}\n${time(e.step)}, ${trim(e.tokens_per_s)} tokens/s, ${trim(e.tokens_per_s_per_device)} a device of ${e.schedule.devices}\n${bytes(e.memory)} of ${bytes(e.device_memory)}`));
  });
  const reasons = new Map();
  for (const r of found.rejected) {
    const key = r.reason.replace(/[^A-Za-z]+/g, " ");
    const one = reasons.get(key) ?? { n: 0, reason: r.reason, schedule: r.schedule };
    one.n++;
    reasons.set(key, one);
  }
  const rows = [...reasons.values()].sort((a, b) => b.n - a.n);
  const head = el("tr", {}, el("th", { class: "n" }, "rejected"), el("th", {}, `of ${found.considered}: why, of one of them`), el("th", {}, "which"));
  byId("search").querySelector("table").append(el("thead", {}, head), el("tbody", {}, ...rows.map(r =>
    el("tr", {}, el("td", { class: "n" }, String(r.n)), el("td", { class: "wide" }, r.reason), el("td", {}, ranks(r.schedule))))));
}

// --- the table, sorted by any column
let sorted = { column: "total_us", down: true };
function operators() {
  const first = ["stage", "program", "layer", "operator", "share", "total_us", "bound_by"];
  const columns = [...first, ...DATA.columns.filter(c => !first.includes(c))].filter(c => c !== "kernel" && ROWS.some(r => r[c] !== "" && r[c] !== ROWS[0][c] || ROWS.length < 2));
  const number = c => typeof ROWS[0]?.[c] === "number";
  const show = (c, v) => c === "share" ? `${trim(100 * v)} %` : typeof v !== "number" || Number.isInteger(v) ? String(v) : trim(v);
  const { column, down } = sorted;
  const order = [...ROWS].sort((a, b) => (number(column) ? a[column] - b[column] : String(a[column]).localeCompare(String(b[column]))) * (down ? -1 : 1));
  const heads = columns.map(c => {
    const button = el("button", {}, c.replace(/_us$/, ", µs").replace(/_/g, " "));
    button.addEventListener("click", () => { sorted = { column: c, down: c === sorted.column ? !sorted.down : number(c) }; operators(); });
    return el("th", { class: number(c) ? "n" : "", "aria-sort": c === column ? (down ? "descending" : "ascending") : "none" }, button);
  });
  const rows = order.map(r => el("tr", {}, ...columns.map(c => el("td", c === "operator" ? { class: "name", title: r[c] } : { class: number(c) ? "n" : "" }, show(c, r[c])))));
  byId("operators").querySelector("table").replaceChildren(el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows));
}

facts();
search();
times();
roofline();
memory();
timeline();
sensitivity();
operators();
