// What a pass did, or several: two stages of one kind side by side, by origin, node by node.
const signature = (b, i) => `${b.head(i)} : ${b.type(i)}`;

// By origin: lines with how often they stand before and after.
function compare(before, after) {
  const origins = new Map();
  const put = (b, side) => {
    for (let i = 0; b && i < b.count; i++) {
      if (!origins.has(b.origin(i))) origins.set(b.origin(i), new Map());
      const lines = origins.get(b.origin(i)), line = signature(b, i);
      if (!lines.has(line)) lines.set(line, { n: [0, 0], at: [null, null] });
      lines.get(line).n[side] += b.times(i);
      lines.get(line).at[side] ??= i;
    }
  };
  put(before, 0);
  put(after, 1);
  return [...origins].map(([origin, lines]) => {
    const row = { origin, lines, before: 0, after: 0, gone: 0, came: 0, stayed: 0 };
    for (const { n: [a, b] } of lines.values()) {
      row.before += a;
      row.after += b;
      row.gone += Math.max(0, a - b);
      row.came += Math.max(0, b - a);
      row.stayed += Math.min(a, b);
    }
    return row;
  });
}

const total = (rows, key) => rows.reduce((s, r) => s + r[key], 0);
const signed = (n, sign) => n ? `${sign}${n}` : "·";

// One button a stage: its time and what it changed in the chosen kind.
function chips() {
  const p = program();
  let graph = -1;
  return el("div", { id: "stages" }, p.stages.map(s => {
    const ms = `${(s.seconds * 1e3).toFixed(s.seconds < 0.01 ? 2 : 0)} ms`;
    if (!s.kinds) return el("span", { class: "stage" }, el("b", {}, s.name), el("span", { class: "dim" }, `${s.nodes} kernels`), el("span", { class: "dim" }, ms));
    const at = ++graph;
    const rows = at === 0 ? [] : compare(graphOf(at - 1, STATE.kind), graphOf(at, STATE.kind));
    const [gone, came] = [total(rows, "gone"), total(rows, "came")];
    const what = at === 0 ? `${graphOf(0, STATE.kind)?.count ?? 0} nodes` : gone + came ? `−${gone} +${came}` : "unchanged";
    const chosen = STATE.stage === at && (STATE.since === at - 1 || at === 0);
    return el("button", { class: "stage", "aria-pressed": chosen, "data-pass": s.name, onclick: () => show({ since: Math.max(0, at - 1), stage: at }) },
      el("b", {}, s.name), el("span", { class: gone + came ? "" : "dim" }, what), el("span", { class: "dim" }, ms));
  }));
}

// What the search for equal forms found in the chosen kind.
function searched() {
  const found = program().searched.find(s => s.kind === STATE.kind);
  const [a, b] = [STATE.since, STATE.stage].sort((x, y) => x - y);
  if (!found || !program().graphs.slice(a + 1, b + 1).some(g => g.name === "saturate")) return null;
  const [rounds, terms, classes] = found.size;
  const fired = Object.entries(found.fired).map(([rule, n]) => `${rule} ×${n}`).join(", ") || "no rule applied";
  const [was, is] = found.cost.map(ps => asTime(ps / 1e12));
  return el("p", { class: "note" }, `saturate: ${fired}; ${rounds} rounds, ${terms} terms in ${classes} classes`
    + `${found.saturated ? "" : ", ended by a limit"}; predicted ${was} before, ${is} after`);
}

function lines(row) {
  const out = [];
  for (const [text, { n: [a, b], at }] of row.lines) {
    const kind = a === b ? "stayed" : b > a ? "came" : "gone";
    const sign = { stayed: " ", came: "+", gone: "−" }[kind];
    const times = Math.max(a, b) > 1 ? ` ×${a === b ? a : Math.abs(a - b)}` : "";
    const stage = at[1] !== null ? STATE.stage : STATE.since;
    out.push(el("button", { class: `line ${kind}`, title: "show in the graph", onclick: () => show({ tab: "graph", stage, node: at[1] ?? at[0] }) }, `${sign} ${text}${times}`));
  }
  return out.sort((x, y) => x.classList.contains("stayed") - y.classList.contains("stayed"));
}

VIEWS.passes = {
  draw() {
    const p = program(), names = p.graphs.map(s => s.name);
    const rows = compare(graphOf(STATE.since, STATE.kind), graphOf(STATE.stage, STATE.kind));
    const differ = rows.filter(r => r.gone || r.came), same = rows.filter(r => !r.gone && !r.came);
    const pick = (id, key) => {
      const select = el("select", { id, onchange: e => show({ [key]: Number(e.target.value) }) });
      options(select, names, STATE[key]);
      return select;
    };
    const table = list => el("table", { class: "diff" },
      el("thead", {}, el("tr", {}, ["origin", "before", "after", "vanished", "came", "stayed"].map((h, i) => el("th", { class: i ? "n" : "" }, h)))),
      list.map(r => {
        const inner = el("tr", { class: "lines", hidden: true }, el("td", { colspan: 6 }));
        const head = el("tr", { tabindex: 0, "data-origin": r.origin, "aria-expanded": false },
          el("td", { class: "origin" }, r.origin || "(no origin)"), el("td", { class: "n" }, r.before), el("td", { class: "n" }, r.after),
          el("td", { class: "n gone" }, signed(r.gone, "−")), el("td", { class: "n came" }, signed(r.came, "+")), el("td", { class: "n dim" }, r.stayed || "·"));
        const toggle = () => {
          inner.hidden = !inner.hidden;
          head.setAttribute("aria-expanded", !inner.hidden);
          if (!inner.firstChild.firstChild) inner.firstChild.append(...lines(r));
        };
        head.addEventListener("click", toggle);
        head.addEventListener("keydown", e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); toggle(); } });
        return el("tbody", {}, head, inner);
      }));
    byId("view-passes").replaceChildren(...[chips(),
      el("p", {}, el("label", {}, "from after ", pick("before", "since")), " ", el("label", {}, "to after ", pick("after", "stage")),
        `  ${STATE.kind}: ${total(rows, "before")} nodes, then ${total(rows, "after")}: `,
        el("span", { class: "gone" }, `${total(rows, "gone")} vanished`), ", ", el("span", { class: "came" }, `${total(rows, "came")} came`),
        `, ${total(rows, "stayed")} stayed`),
      searched(),
      differ.length ? table(differ) : el("p", { class: "note" }, `Nothing in ${STATE.kind} differs between the two.`),
      same.length ? el("details", {}, el("summary", {}, `${same.length} origins where all stayed`), table(same)) : null].filter(Boolean));
  },
};
