// What was compiled, as the page asks for it. Bodies are columns of numbers that refer to one list of texts.
const DATA = JSON.parse(document.getElementById("data").textContent);
const TEXT = DATA.strings;

// Classes of operators, for colours and for folding.
const LEAF = new Set(["input", "weight", "state", "const", "iota"]);
const VIEW = new Set(["reshape", "permute", "expand", "slice", "cast", "part"]);
const DOTS = new Set(["dot", "grouped_dot", "grouped_outer", "linear_cross_entropy", "linear_cross_entropy_grad"]);
const EFFECT = new Set(["store", "scatter", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv"]);

function classOf(op) {
  if (op === "weight" || op === "state") return "weight";
  if (LEAF.has(op)) return "leaf";
  if (VIEW.has(op)) return "view";
  if (DOTS.has(op)) return "dot";
  if (op.startsWith("attention")) return "attention";
  if (op === "call") return "call";
  if (EFFECT.has(op)) return "effect";
  return ["rms_norm", "layer_norm", "softmax", "reduce", "cumsum", "topk", "argmax", "route"].includes(op) ? "row" : "point";
}

// One body: nodes with their texts, users, and what they cost by themselves.
class Body {
  constructor(columns) {
    this.columns = columns;
    this.count = columns.h.length;
    this.args = columns.a;
    this.results = columns.out;
  }
  head(i) { return TEXT[this.columns.h[i]]; }
  op(i) { return this.head(i).split(" ", 1)[0]; }
  type(i) { return TEXT[this.columns.t[i]]; }
  origin(i) { return TEXT[this.columns.o[i]]; }
  times(i) { return this.columns.x ? this.columns.x[i] : 1; }
  which(i) { return this.columns.i ? TEXT[this.columns.i[i]] : ""; }
  flops(i) { return this.columns.f[i]; }
  bytes(i) { return this.columns.b[i]; }
  class(i) { return classOf(this.op(i)); }
  get users() {
    if (!this.usersOf) {
      this.usersOf = Array.from({ length: this.count }, () => []);
      this.args.forEach((args, i) => args.forEach(a => {
        if (!this.usersOf[a].includes(i)) this.usersOf[a].push(i);
      }));
    }
    return this.usersOf;
  }
}

const BODIES = DATA.bodies.map(columns => new Body(columns));

// An origin with its layers: `model.layers.{0–125}.norm`.
const withLayers = (origin, which) => which && origin.includes("*") && !which.includes(".") ? origin.replace("*", `{${which}}`) : origin;

// Stages that leave a graph, with the bodies of their kinds by name.
for (const program of DATA.programs) {
  program.graphs = program.stages.filter(s => s.kinds).map(s => ({ ...s, kinds: new Map(s.kinds) }));
  program.kinds = [];
  for (const g of program.graphs) {
    for (const kind of g.kinds.keys()) if (!program.kinds.includes(kind)) program.kinds.push(kind);
  }
  program.planOf = new Map(program.plans.map(p => [p.kind, p]));
  for (const plan of program.plans) {
    plan.steps = plan.groups.flatMap(([times, from, rows]) => rows.map((row, n) => ({ ...row, times, at: from + n })));
    plan.stepsOf = new Map();
    for (const step of plan.steps) {
      for (const n of step.n || []) plan.stepsOf.set(n, [...(plan.stepsOf.get(n) || []), step]);
    }
  }
  // What one run of a body costs, calls included; a body calls only bodies that have no calls.
  const sum = plan => {
    plan.cost ??= plan.steps.reduce((total, step) => {
      const one = step.call === undefined ? { launches: 1, ...program.regions[step.run] } : sum(program.plans[step.call + 1]);
      for (const key of ["launches", "flops", "bytes", "seconds"]) total[key] += step.times * one[key];
      return total;
    }, { launches: 0, flops: 0, bytes: 0, seconds: 0 });
    return plan.cost;
  };
  program.plans.forEach(sum);
  // How often, and from where, a body is called: `layers.*`, for the search, and which.
  for (const plan of program.plans) Object.assign(plan, { calls: 0, from: new Map() });
  for (const step of program.plans[0].steps) {
    if (step.call === undefined) continue;
    const callee = program.plans[step.call + 1];
    callee.calls += step.times;
    const name = TEXT[step.o].replace(/(^|\.)\d+(?=\.|$)/g, "$1*");
    callee.from.set(name, [...(callee.from.get(name) || []), withLayers(TEXT[step.o], TEXT[step.i])]);
  }
}

// Seconds of the target's roofline.
const roofline = (flops, bytes) => Math.max(flops / DATA.target.flops, bytes / DATA.target.bandwidth);

function scaled(x, step, units, digits = 3) {
  let at = 0;
  while (x >= step * 0.9995 && at + 1 < units.length) { x /= step; at++; }
  return `${at ? Number(x.toPrecision(digits)).toString() : Math.round(x)} ${units[at]}`.trimEnd();
}
const asBytes = n => scaled(n, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const asCount = n => scaled(n, 1000, ["", "k", "M", "G", "T", "P", "E"]);
const asTime = s => s >= 3600 ? `${(s / 3600).toPrecision(3)} h` : s >= 100 ? `${Math.round(s)} s` : s >= 1 ? `${s.toPrecision(3)} s` : s >= 1e-3 ? `${(s * 1e3).toPrecision(3)} ms` : s >= 1e-6 ? `${(s * 1e6).toPrecision(3)} µs` : `${(s * 1e9).toFixed(0)} ns`;
const share = (part, whole) => whole > 0 ? part / whole : 0;

// An element with attributes, listeners (`onclick`) and children.
function el(name, attributes = {}, ...children) {
  const e = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("aria-") && typeof value === "boolean") { e.setAttribute(key, value); continue; }
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) e.addEventListener(key.slice(2), value);
    else e.setAttribute(key, value === true ? "" : value);
  }
  e.append(...children.flat(Infinity).filter(c => c !== null && c !== undefined && c !== false));
  return e;
}
const byId = id => document.getElementById(id);
const bar = part => el("span", { class: "bar", "aria-hidden": "true" }, (() => {
  const fill = el("i");
  fill.style.width = `${Math.max(0, Math.min(1, part)) * 100}%`;
  return fill;
})());
