// What is shown: one object, changed through `show`, which redraws what depends on it.
const STATE = { program: 0, kind: "main", stage: 0, since: 0, tab: "plan", node: null, step: null, value: null };
const VIEWS = {};

const program = () => DATA.programs[STATE.program];
const graphOf = (stage, kind) => {
  const at = program().graphs[stage]?.kinds.get(kind);
  return at === undefined ? null : BODIES[at];
};
const body = () => graphOf(STATE.stage, STATE.kind);
const planned = () => program().planOf.get(STATE.kind);
// True when the steps of the plan name nodes of the body that is shown.
const isPlanned = () => planned() && program().graphs[STATE.stage]?.kinds.get(STATE.kind) === planned().graph;

function show(change) {
  const before = { ...STATE };
  Object.assign(STATE, change);
  const p = program();
  if (STATE.program !== before.program) {
    STATE.stage = Math.min(STATE.stage, p.graphs.length - 1);
    if (!("stage" in change)) STATE.stage = p.graphs.length - 1;
    STATE.since = 0;
    if (!p.kinds.includes(STATE.kind)) STATE.kind = "main";
  }
  const moved = ["program", "kind", "stage"].some(key => STATE[key] !== before[key]);
  if (moved) {
    if (!("node" in change)) STATE.node = null;
    if (!("step" in change)) STATE.step = null;
    if (!("value" in change)) STATE.value = null;
  }
  drawControls();
  VIEWS[STATE.tab].draw(before, moved || STATE.tab !== before.tab);
  drawDetails();
  remember();
}

function options(select, names, chosen) {
  const key = names.join("\n");
  if (select.dataset.names !== key) {
    select.replaceChildren(...names.map((name, i) => el("option", { value: i }, name)));
    select.dataset.names = key;
  }
  select.value = chosen;
}

function drawControls() {
  const p = program();
  options(byId("program"), DATA.programs.map(q => q.name || (DATA.programs.length > 1 ? "gradient" : "program")), STATE.program);
  byId("pick-program").hidden = DATA.programs.length < 2;
  options(byId("kind"), p.kinds.map(k => {
    const calls = p.planOf.get(k)?.calls;
    return calls ? `${k} ×${calls}` : k;
  }), p.kinds.indexOf(STATE.kind));
  options(byId("stage"), p.graphs.map(s => s.name), STATE.stage);
  options(byId("since"), p.graphs.map(s => s.name), STATE.since);
  byId("pick-stage").hidden = STATE.tab !== "graph";
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const chosen = tab.dataset.tab === STATE.tab;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    byId(`view-${tab.dataset.tab}`).hidden = !chosen;
  }
}

// The address after `#` keeps the place, so that a reload or a link shows the same.
function remember() {
  const { program, kind, stage, since, tab, node } = STATE;
  const hash = "#" + new URLSearchParams({ program, kind, stage, since, tab, ...(node === null ? {} : { node }) });
  if (location.hash !== hash) history.replaceState(null, "", hash);
}

function recall() {
  const said = new URLSearchParams(location.hash.slice(1));
  const number = (key, most) => {
    const n = Number(said.get(key));
    return said.has(key) && Number.isInteger(n) && n >= 0 && n < most ? n : undefined;
  };
  const change = { program: number("program", DATA.programs.length) ?? 0 };
  const p = DATA.programs[change.program];
  change.stage = number("stage", p.graphs.length) ?? p.graphs.length - 1;
  change.since = number("since", p.graphs.length) ?? 0;
  change.kind = p.kinds.includes(said.get("kind")) ? said.get("kind") : "main";
  change.tab = VIEWS[said.get("tab")] ? said.get("tab") : "plan";
  change.node = number("node", BODIES[p.graphs[change.stage].kinds.get(change.kind)]?.count ?? 0) ?? null;
  return change;
}
