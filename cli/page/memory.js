// Memory over time: every value of the arena as a rectangle, from the step that makes it to the last that reads it, at its
// bytes. The arena of the layers is shared by all calls; the one around them holds what lives between calls.
const MARGIN = { left: 74, right: 14, top: 10, bottom: 24 };

// Bytes in use at each step.
function live(plan) {
  const at = new Array(plan.labels.length + 1).fill(0);
  for (const [, bytes, first, last] of plan.memory) { at[first] += bytes; at[last + 1] -= bytes; }
  for (let i = 1; i < at.length; i++) at[i] += at[i - 1];
  return at.slice(0, -1);
}

// Round marks for up to about `n` of them.
function marks(most, n, base) {
  let unit = 1;
  while (most / unit > n) unit *= 2;
  if (base === 10) { unit = 1; for (const f of [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]) if (most / unit > n) unit = f; }
  const all = [];
  for (let x = 0; x <= most; x += unit) all.push(x);
  return all;
}

function chart(plan, width, height) {
  const steps = plan.labels.length, w = width - MARGIN.left - MARGIN.right, h = height - MARGIN.top - MARGIN.bottom;
  const x = step => MARGIN.left + step / steps * w, y = bytes => MARGIN.top + h - bytes / plan.arena * h;
  const drawn = svgEl("svg", { id: "arena", width, height, role: "img", "aria-label": `Arena of ${plan.kind} over its steps; the table below has the same` });
  for (const bytes of marks(plan.arena, 6)) {
    drawn.append(svgEl("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(bytes), y2: y(bytes) }));
    const label = svgEl("text", { class: "axis end", x: MARGIN.left - 6, y: y(bytes) + 4 });
    label.textContent = asBytes(bytes);
    drawn.append(label);
  }
  for (const at of marks(steps, Math.max(2, w / 70), 10)) {
    const label = svgEl("text", { class: "axis", x: x(at), y: height - 8 });
    label.textContent = at;
    drawn.append(label);
  }
  const palette = ["dot", "row", "point", "attention", "effect", "view"], seen = new Map();
  plan.memory.forEach(([offset, bytes, first, last, origin, type], n) => {
    // One colour for what every layer leaves.
    const name = TEXT[origin].replace(/\d+/g, "*") + TEXT[type];
    if (!seen.has(name)) seen.set(name, palette[seen.size % palette.length]);
    const gap = w / steps > 3 ? 1 : 0, high = bytes / plan.arena * h, wide = x(last + 1) - x(first) - gap;
    drawn.append(svgEl("rect", { class: `slot ${seen.get(name)}${STATE.value === n ? " chosen" : ""}`, "data-value": n, x: x(first).toFixed(2), y: y(offset + bytes).toFixed(2),
      width: Math.max(0.5, wide).toFixed(2), height: Math.max(0.5, high - (high > 3 ? 1 : 0)).toFixed(2) }));
    if (high > 15 && wide > 40) {
      const label = svgEl("text", { class: "named", x: x(first) + 5, y: y(offset + bytes) + 12 });
      label.textContent = short(TEXT[origin] || TEXT[type], Math.floor((wide - 8) / 6.4));
      drawn.append(label);
    }
  });
  const use = live(plan);
  const line = use.map((bytes, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(bytes).toFixed(1)}H${x(i + 1).toFixed(1)}`).join("");
  drawn.append(svgEl("path", { class: "live", d: line }), svgEl("line", { id: "cross", class: "cross", y1: MARGIN.top, y2: MARGIN.top + h, x1: -9, x2: -9 }));
  drawn.addEventListener("pointermove", e => point(e, plan, use, { x, w, steps, drawn }));
  drawn.addEventListener("pointerleave", () => { byId("tip").hidden = true; byId("cross").setAttribute("x1", -9); byId("cross").setAttribute("x2", -9); });
  drawn.addEventListener("click", e => { if (e.target.dataset.value !== undefined) show({ value: Number(e.target.dataset.value) }); });
  return drawn;
}

// Names what is under the pointer.
function point(e, plan, use, { w, steps, drawn }) {
  const r = drawn.getBoundingClientRect(), tip = byId("tip");
  const at = Math.floor((e.clientX - r.left - MARGIN.left) / w * steps);
  if (at < 0 || at >= steps) { tip.hidden = true; return; }
  const cross = MARGIN.left + (at + 0.5) / steps * w;
  for (const key of ["x1", "x2"]) byId("cross").setAttribute(key, cross);
  const row = plan.memory[e.target.dataset.value];
  const parts = row ? [el("b", {}, TEXT[row[4]] || "(no origin)"), el("br"), `${TEXT[row[5]]}, ${asBytes(row[1])} at ${asBytes(row[0])}`, el("br"),
    `steps ${row[2]} to ${row[3]}`, el("hr")] : [];
  tip.replaceChildren(...parts, `step ${at}: ${TEXT[plan.labels[at]]}`, el("br"), `${asBytes(use[at])} in use`);
  tip.hidden = false;
  const t = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(e.clientX + 14, innerWidth - t.width - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(e.clientY + 14, innerHeight - t.height - 8))}px`;
}

VIEWS.memory = {
  draw() {
    byId("tip").hidden = true;
    const plan = planned(), view = byId("view-memory");
    const choose = el("p", {}, program().plans.filter(q => q.arena > 0).map(q => el("button", { class: "choice", "aria-pressed": q === plan, onclick: () => show({ kind: q.kind }) },
      `${q.kind}: ${asBytes(q.arena)}`)), el("span", { class: "dim" }, ` shared by all calls of layers: ${asBytes(program().scratch)}`));
    if (!plan || plan.arena === 0) {
      view.replaceChildren(choose, el("p", { class: "note" }, `${STATE.kind} keeps nothing in the arena.`));
      return;
    }
    const use = live(plan), most = use.reduce((m, b) => Math.max(m, b), 0);
    const sorted = plan.memory.map((row, n) => [row, n]).sort(([a], [b]) => b[1] - a[1]);
    const shown = sorted.slice(0, 200);
    const width = Math.max(320, view.clientWidth - 24), height = Math.max(220, Math.min(460, innerHeight - 330));
    view.replaceChildren(choose,
      el("p", {}, `${plan.kind}: an arena of ${asBytes(plan.arena)} over ${plan.labels.length} steps; at most ${asBytes(most)} in use at once, `
        + `at step ${use.indexOf(most)} (${TEXT[plan.labels[use.indexOf(most)]]})`),
      chart(plan, width, height),
      el("table", { id: "values" }, el("caption", {}, sorted.length > shown.length ? `the ${shown.length} largest of ${sorted.length} values` : `${sorted.length} values`),
        el("thead", {}, el("tr", {}, ["bytes", "offset", "steps", "origin", "type"].map((h, i) => el("th", { class: i < 3 ? "n" : "" }, h)))),
        el("tbody", {}, shown.map(([[offset, bytes, first, last, origin, type], n]) => {
          const choose = () => show({ value: n });
          return el("tr", { tabindex: 0, "aria-selected": STATE.value === n, onclick: choose, onkeydown: e => { if (e.key === "Enter") choose(); } },
            el("td", { class: "n" }, asBytes(bytes)), el("td", { class: "n" }, asBytes(offset)), el("td", { class: "n" }, `${first}–${last}`),
            el("td", { class: "origin" }, TEXT[origin] || "(no origin)"), el("td", { class: "mono" }, TEXT[type]));
        }))));
  },
};
