// The plan: kinds as cards, and the steps of the chosen kind in order with what each costs.
function drawFacts() {
  const r = DATA.report;
  const name = [r.model_type, r.for].filter(Boolean).join(" · ") || "graph";
  document.title = `astrai: ${name}`;
  byId("title").replaceChildren(el("b", {}, "astrai"), ` ${name}`);
  const seconds = DATA.programs.reduce((s, p) => s + p.plans[0].cost.seconds, 0);
  const rows = [
    ["batch × seq", r.batch && `${r.batch} × ${r.seq}`], ["dtype", r.dtype], ["target", DATA.target.name],
    ["parameters", r.parameters !== undefined && asCount(r.parameters)], ["kernels", r.kernels], ["launches", r.launches],
    ["flops", asCount(r.flops)], ["bytes", asBytes(r.bytes)], ["weights", asBytes(r.weight_bytes)],
    ["states", r.state_bytes && asBytes(r.state_bytes)], ["planned memory", asBytes(r.planned_bytes)],
    ["KV a token", r.kv_bytes_per_token && asBytes(r.kv_bytes_per_token)], ["predicted", asTime(seconds)],
    ["compiled in", asTime(r.compile_seconds)],
  ];
  byId("facts").replaceChildren(...rows.filter(([, v]) => v).map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v))));
}

// One card a kind: what it is made of and its share of the time.
function cards() {
  const p = program();
  const whole = p.plans[0].cost.seconds;
  return el("div", { id: "cards" }, p.plans.map(plan => {
    const calls = plan.kind === "main" ? 1 : plan.calls;
    // Of the graph around the layers only what is its own.
    const own = plan.kind !== "main" ? plan.cost : plan.steps.filter(s => s.call === undefined)
      .reduce((t, s) => ({ launches: t.launches + s.times, seconds: t.seconds + s.times * p.regions[s.run].seconds }),
        { launches: 0, seconds: 0 });
    const part = share(own.seconds * calls, whole);
    return el("button", {
      class: "card", "data-kind": plan.kind, "aria-pressed": plan.kind === STATE.kind,
      onclick: () => show({ kind: plan.kind }), ondblclick: () => show({ kind: plan.kind, tab: "graph" }),
    },
      el("b", {}, plan.kind), el("span", {}, plan.kind === "main" ? "around the layers" : `× ${plan.calls}`),
      el("span", { class: "dim" }, `${BODIES[plan.graph].count} nodes, ${own.launches} launches`),
      el("span", {}, `${asTime(own.seconds)}, ${(part * 100).toFixed(1)} %`), bar(part));
  }));
}

function costCells(flops, bytes, seconds, whole) {
  return [
    el("td", { class: "n" }, flops ? asCount(flops) : "·"), el("td", { class: "n" }, bytes ? asBytes(bytes) : "·"),
    el("td", { class: "n" }, asTime(seconds)), el("td", { class: "n" }, `${(share(seconds, whole) * 100).toFixed(1)} %`),
    el("td", {}, bar(share(seconds, whole))),
  ];
}

function stepRow(step, times, whole) {
  const p = program();
  const name = withLayers(TEXT[step.o], TEXT[step.i]);
  const open = () => step.call === undefined ? show({ step: step.at, node: null }) : show({ kind: p.plans[step.call + 1].kind });
  const call = step.call !== undefined;
  const r = call ? p.plans[step.call + 1].cost : p.regions[step.run];
  const what = call ? p.plans[step.call + 1].kind : r.anchor;
  return el("tr", {
    class: call ? "call" : "", tabindex: 0, "data-step": step.at, "aria-selected": STATE.step === step.at,
    onclick: open, onkeydown: e => { if (e.key === "Enter") open(); },
  },
    el("td", { class: "n dim" }, step.at), el("td", {}, el("span", { class: `chip ${call ? "call" : what}` }, what)),
    el("td", { class: "origin" }, name || (call ? "" : r.origin)),
    el("td", { class: "n" }, times > 1 ? `× ${times}` : ""), costCells(r.flops, r.bytes, r.seconds * times, whole));
}

VIEWS.plan = {
  draw() {
    const plan = planned();
    const view = byId("view-plan");
    if (!plan) {
      view.replaceChildren(cards(), el("p", { class: "note" }, `No step of the plan is in ${STATE.kind}: the passes took it away.`));
      return;
    }
    const whole = plan.cost.seconds;
    const rows = [];
    for (const [times, from, steps] of plan.groups) {
      if (times > 1 && steps.length > 1) {
        const last = from + times * steps.length - 1;
        rows.push(el("tr", { class: "repeat" }, el("td", { class: "n dim" }, `${from}–${last}`),
          el("td", { colspan: 8 }, `these ${steps.length} steps, ${times} times:`)));
      }
      steps.forEach((step, n) => rows.push(stepRow({ ...step, at: from + n }, times, whole)));
    }
    const heads = ["step", "kernel", "origin", "", "flops", "bytes", "predicted", "share", ""];
    view.replaceChildren(cards(), el("table", { id: "steps" },
      el("caption", {}, `${plan.kind}: ${plan.steps.reduce((n, s) => n + s.times, 0)} steps in order, at the largest sizes (${program().symbols.join(", ") || "all fixed"}); `
        + "predicted by the target's roofline"),
      el("thead", {}, el("tr", {}, heads.map((h, i) => el("th", { class: [0, 3, 4, 5, 6, 7].includes(i) ? "n" : "" }, h)))),
      el("tbody", {}, rows)));
    if (STATE.step !== null) view.querySelector(`[data-step="${STATE.step}"]`)?.scrollIntoView({ block: "nearest" });
  },
};
