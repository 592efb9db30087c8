// What is chosen, in words and numbers: a node, a step of the plan, or a value in memory.
const row = (name, ...value) => value.flat().some(v => v !== null && v !== "" && v !== undefined) ? [el("dt", {}, name), el("dd", {}, value)] : null;

// Links to other nodes of the body.
function links(b, list) {
  return list.map(i => el("button", { class: "link", title: b.origin(i), onclick: () => show({ node: i, step: null }) }, `%${i} ${b.op(i)}`));
}

function kernel(step) {
  const r = program().regions[step.run];
  const of = step.times > 1 ? ` of ${step.times} like it` : "";
  return el("section", { class: "kernel" },
    el("h3", {}, "kernel ", el("code", {}, r.kernel || (r.anchor === "eval" ? "none: the interpreter runs it" : "none"))),
    el("dl", {}, row("anchor", r.anchor), row("step", `${step.at}${of} in ${planned().kind}`), row("origin", TEXT[step.o] || r.origin),
      row("reads", el("code", {}, r.reads.join("\n"))), row("writes", el("code", {}, r.writes.join("\n"))),
      row("flops", asCount(r.flops), el("span", { class: "dim" }, ` = ${r.flops_of}`)), row("bytes", asBytes(r.bytes), el("span", { class: "dim" }, ` = ${r.bytes_of}`)),
      row("predicted", asTime(r.seconds))),
    step.n?.length ? el("p", {}, el("span", { class: "dim" }, "nodes "), step.n.map(i => el("button", {
      class: "link", onclick: () => show({ tab: "graph", stage: program().graphs.length - 1, node: i, step: null }) }, `%${i} ${BODIES[planned().graph].op(i)}`))) : null,
    r.source ? el("pre", { tabindex: 0, "aria-label": "source of the kernel" }, r.source) : null);
}

function node(b, i) {
  const op = b.op(i), called = b.head(i).match(/^call block=(.*)$/)?.[1];
  const [flops, bytes] = [b.flops(i), b.bytes(i)];
  const cost = flops || bytes ? [row("flops", asCount(flops)), row("bytes", asBytes(bytes)), row("predicted", asTime(roofline(flops, bytes)),
    el("span", { class: "dim" }, " as a kernel by itself"))] : row("cost", LEAF.has(op) ? "none" : called ? "that of the kind" : "none by itself");
  const results = b.results.filter(([, at]) => at === i).map(([name]) => name);
  const plan = planned();
  let steps = isPlanned() ? plan.stepsOf.get(i) || [] : [];
  // Before the last pass nodes have other numbers: kernels are found by origin.
  const near = !isPlanned() && plan && b.origin(i) ? plan.steps.filter(s => s.run !== undefined && ` ${TEXT[s.o]} `.includes(` ${b.origin(i)} `)) : [];
  steps = steps.length ? steps : near;
  return [
    el("h2", {}, el("span", { class: `chip ${b.class(i)}` }, op), ` %${i}`),
    el("dl", {}, row("is", el("code", {}, b.head(i))), row("type", el("code", { class: "of-type" }, b.type(i))),
      row("origin", el("code", { class: "of-origin" }, b.origin(i))), b.times(i) > 1 ? row("layers", `${b.times(i)} times: ${b.which(i)}`) : null,
      row("result", results.join(", ")), row("takes", links(b, b.args[i])), row("taken by", links(b, b.users[i])), cost),
    called && program().kinds.includes(called) ? el("p", {}, el("button", { class: "choice", onclick: () => show({ kind: called, node: null }) }, `open ${called}`)) : null,
    near.length ? el("p", { class: "note" }, "Kernels of the same origin; after the last pass the exact one is known:") : null,
    steps.length ? steps.map(kernel) : el("p", { class: "note" }, plan ? "No kernel computes this by itself: it is in memory already, or a view of what is." : ""),
  ];
}

function overview() {
  const b = body();
  return [el("h2", {}, STATE.kind), el("p", { class: "note" }, "Choose a node, a step or a value."),
    b ? el("dl", {}, row("nodes", b.count), row("takes", el("code", {}, [...Array(b.count).keys()].filter(i => ["input", "weight", "state"].includes(b.op(i)))
      .slice(0, 60).map(i => `${b.head(i).split(" ")[1]}: ${b.type(i)}${b.times(i) > 1 ? ` ×${b.times(i)}` : ""}`).join("\n"))),
      row("gives", el("code", {}, b.results.slice(0, 60).map(([name, at]) => `${name}: ${b.type(at)}${b.times(at) > 1 ? ` ×${b.times(at)}` : ""}`).join("\n")))) : null];
}

function value(plan, n) {
  const [offset, bytes, first, last, origin, type] = plan.memory[n];
  const named = plan.labels.map((label, at) => [label, at]).slice(first, last + 1);
  return [el("h2", {}, "value"), el("dl", {}, row("origin", el("code", {}, TEXT[origin] || "(no origin)")), row("type", el("code", {}, TEXT[type])),
    row("bytes", `${asBytes(bytes)} (${bytes}) at ${offset}`), row("steps", `${first} to ${last}`)),
    el("ol", { class: "through" }, named.slice(0, 40).map(([label, at]) => el("li", {}, el("span", { class: "dim" }, `${at} `), TEXT[label]))),
    named.length > 40 ? el("p", { class: "dim" }, `and ${named.length - 40} more`) : null];
}

function drawDetails() {
  const b = body(), plan = planned();
  const step = STATE.step !== null && plan?.steps.find(s => s.at === STATE.step);
  const shown = STATE.tab === "memory" && STATE.value !== null && plan?.memory[STATE.value] ? value(plan, STATE.value)
    : STATE.tab === "plan" && step && step.run !== undefined ? kernel(step)
      : STATE.tab !== "memory" && b && STATE.node !== null && STATE.node < b.count ? node(b, STATE.node) : overview();
  // For who hears the page: what the arrows have come to.
  byId("said").textContent = STATE.tab === "graph" && b && STATE.node !== null ? `${b.head(STATE.node)}, ${b.type(STATE.node)}, ${b.origin(STATE.node)}` : "";
  byId("details").replaceChildren(...[shown].flat(Infinity).filter(Boolean));
}
