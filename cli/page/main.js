// Search, keys and the beginning.
const MOST = 60;

// Nodes of the shown stage in every kind, and kernels: what has every word of the query in its origin, text or name. Numbers in
// origins around the layers are `*`, and so are they in the query where nothing else matches.
function matches(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  const p = program(), found = [];
  const has = text => words.every(w => text.includes(w) || (/\d/.test(w) && text.includes(w.replace(/(^|\.)\d+(?=\.|$)/g, "$1*"))));
  const kinds = [STATE.kind, ...p.kinds.filter(k => k !== STATE.kind)];
  for (const kind of kinds) {
    const b = graphOf(STATE.stage, kind);
    // A node of a layer is also known by where the layer is called.
    const from = [...(p.planOf.get(kind)?.from || [])];
    const prefix = from.map(([name]) => name + ".").join(" "), calls = from.length === 1 && from[0][1].length === 1 ? from[0][1][0] + "." : "";
    for (let i = 0; b && i < b.count && found.length < MOST; i++) {
      if (has(`${prefix}${b.origin(i)} ${b.head(i)}`.toLowerCase())) {
        found.push({ kind, node: i, text: short(b.head(i), 60), where: calls + withLayers(b.origin(i), b.which(i)), class: b.class(i), op: b.op(i) });
      }
    }
  }
  for (const plan of p.plans) {
    for (const s of plan.steps) {
      const r = s.run === undefined ? null : p.regions[s.run];
      if (r?.kernel && found.length < MOST * 2 && has(r.kernel)) found.push({ kind: plan.kind, step: s.at, text: r.kernel, where: TEXT[s.o], class: r.anchor, op: "kernel" });
    }
  }
  return found;
}

function listenToSearch() {
  const input = byId("search"), list = byId("found");
  let found = [], at = -1;
  const close = () => { list.hidden = true; input.setAttribute("aria-expanded", false); };
  const mark = to => {
    at = to;
    [...list.querySelectorAll("[role=option]")].forEach((o, n) => o.setAttribute("aria-selected", n === at));
    list.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
  };
  const take = m => {
    close();
    show(m.node === undefined ? { tab: "plan", kind: m.kind, step: m.step, node: null } : { tab: "graph", kind: m.kind, node: m.node, step: null });
  };
  const look = () => {
    found = matches(input.value);
    list.replaceChildren(...(found.length ? found.map(m => el("div", { role: "option", class: "match", onpointerdown: e => { e.preventDefault(); take(m); } },
      el("span", { class: `chip ${m.class}` }, m.op), el("span", { class: "origin" }, m.where), el("span", { class: "mono dim" }, m.text), el("span", { class: "dim" }, m.kind)))
      : [el("div", { class: "match dim" }, input.value.trim() ? "nothing of this name" : "type an origin: attn, q_proj, layers.3")]));
    list.hidden = false;
    input.setAttribute("aria-expanded", true);
    mark(found.length ? 0 : -1);
  };
  input.addEventListener("input", look);
  input.addEventListener("focus", look);
  input.addEventListener("blur", close);
  input.addEventListener("keydown", e => {
    if (e.key === "ArrowDown" || e.key === "ArrowUp") { mark(Math.max(0, Math.min(found.length - 1, at + (e.key === "ArrowDown" ? 1 : -1)))); e.preventDefault(); }
    else if (e.key === "Enter" && found[at]) take(found[at]);
    else if (e.key === "Escape") { close(); input.blur(); }
  });
}

function listen() {
  byId("program").addEventListener("change", e => show({ program: Number(e.target.value), node: null, step: null, value: null }));
  byId("kind").addEventListener("change", e => show({ kind: program().kinds[Number(e.target.value)] }));
  byId("stage").addEventListener("change", e => show({ stage: Number(e.target.value) }));
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const tab of tabs) {
    tab.addEventListener("click", () => show({ tab: tab.dataset.tab }));
    tab.addEventListener("keydown", e => {
      const to = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
      if (to) { const next = tabs[(tabs.indexOf(tab) + to + tabs.length) % tabs.length]; show({ tab: next.dataset.tab }); next.focus(); }
    });
  }
  document.addEventListener("keydown", e => {
    if (e.ctrlKey || e.metaKey || e.altKey || e.target.matches("input, select")) return;
    if (e.key === "/") { byId("search").focus(); byId("search").select(); e.preventDefault(); }
  });
  addEventListener("hashchange", () => show(recall()));
  let wait = 0;
  addEventListener("resize", () => { clearTimeout(wait); wait = setTimeout(() => { if (STATE.tab === "memory") VIEWS.memory.draw(STATE, false); }, 80); });
  listenToGraph();
  listenToSearch();
}

drawFacts();
listen();
byId("show-leaves").checked = true;
show(recall());
