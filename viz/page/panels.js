// Header, tables and lists. Every name from data goes through textContent, never through markup.
function el(tag, attributes, text) {
  const node = document.createElement(tag);
  for (const key in attributes || {}) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  return node;
}

function number(v) {
  if (v === null || v === undefined || Number.isNaN(v)) return "–";
  if (typeof v !== "number") return String(v);
  if (v === 0) return "0";
  const size = Math.abs(v);
  return size >= 1000 || Number.isInteger(v) ? String(Math.round(v)) : size >= 100 ? v.toFixed(1) : size >= 0.001 ? v.toFixed(size >= 10 ? 2 : 3) : v.toExponential(1);
}

const short = text => (text.length > 15 ? text.slice(0, 6) + "…" + text.slice(-8) : text); // both ends tell scenes apart
const signed = s => (s < 0 ? "−" : "+") + Math.abs(s).toFixed(1) + " s";
const LARGE_IS_GOOD = { has: name => name === "probability" || name === "log_prob" || name.startsWith("satisfied_") };
const isText = v => typeof v === "string";

// A table that sorts on any column; unknown values stay last in both directions.
class Table {
  constructor(node, onPick) { this.node = node; this.onPick = onPick; }

  fill(columns, rows, sort, descending) { // columns: {key, label, title, kind}; rows: {id, ...}
    Object.assign(this, { columns, rows, sort, descending });
    const head = el("tr");
    for (const c of columns) {
      const th = el("th", { "data-key": c.key, class: c.kind || "", title: c.title || c.label }), button = el("button", { type: "button" }, c.label);
      button.onclick = () => { this.descending = this.sort === c.key ? !this.descending : Boolean(c.down); this.sort = c.key; this.draw(); button.blur(); };
      th.append(button); head.append(th);
    }
    const top = el("thead"); top.append(head); this.body = el("tbody"); this.node.replaceChildren(top, this.body);
    this.draw();
  }

  draw() {
    const flip = this.descending ? -1 : 1, missing = v => v === null || v === undefined || Number.isNaN(v);
    this.rows.sort((p, q) => {
      const u = p[this.sort], v = q[this.sort];
      if (p.pinned || q.pinned) return p.pinned ? -1 : 1;
      if (missing(u) || missing(v)) return missing(u) - missing(v) || p.id - q.id;
      return (isText(u) || isText(v) ? flip * String(u).localeCompare(String(v), undefined, { numeric: true }) : flip * (u - v)) || p.id - q.id;
    });
    for (const th of this.node.querySelectorAll("th")) {
      if (th.dataset.key === this.sort) th.setAttribute("aria-sort", this.descending ? "descending" : "ascending"); else th.removeAttribute("aria-sort");
    }
    this.body.replaceChildren(...this.rows.map(row => this.line(row)));
    this.mark(this.current, false);
  }

  line(row) {
    const tr = el("tr", { "data-id": row.id, ...(row.pinned ? { class: "truth" } : {}) });
    for (const c of this.columns) {
      const v = row[c.key], td = el("td", { class: (c.kind || "") + (v === null || v === undefined ? " none" : c.alarm && v > 0 ? " " + c.alarm : "") }, v === undefined ? "" : isText(v) ? (c.show ? c.show(v) : v) : v !== null && c.show ? c.show(v) : number(v));
      if (isText(v)) td.title = v; else if (v === null) td.title = "unknown";
      if (c.bar && v !== null && v !== undefined) { td.classList.add("p"); td.style.setProperty("--w", c.bar(v)); }
      tr.append(td);
    }
    tr.onclick = () => this.onPick(row.id);
    return tr;
  }

  mark(id, reveal) {
    this.current = id;
    for (const tr of this.body.rows) {
      const on = tr.dataset.id === String(id);
      tr.classList.toggle("on", on);
      if (on && reveal) { // scrollIntoView would also scroll the page
        const box = this.node.parentElement, head = this.node.tHead.offsetHeight;
        if (tr.offsetTop < box.scrollTop + head) box.scrollTop = tr.offsetTop - head;
        else if (tr.offsetTop + tr.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = tr.offsetTop + tr.offsetHeight - box.clientHeight;
      }
    }
  }

  next(id, step) {
    const at = this.rows.findIndex(row => row.id === id);
    return at < 0 ? this.rows[0].id : this.rows[Math.max(0, Math.min(this.rows.length - 1, at + step))].id;
  }
}

const SHORT = { probability: "p", log_prob: "log p", collision: "coll.", off_road: "off-road", infeasible: "infeas.", cluster: "clu." };
const MEANING = { probability: "probability of this joint future; over the futures of one scene they sum to one", log_prob: "log-probability of the whole sample",
  cluster: "scene-level cluster", JADE: "joint average displacement to the recorded future, metres, mean over scored agents",
  JFDE: "joint final displacement to the recorded future, metres, mean over scored agents" };

function fillRanks(table, scene) {
  const scores = scene.meta.scores, top = Math.max(...(scores.probability || [1]).map(v => v || 0), 1e-12);
  const columns = [{ key: "id", label: "#", title: "sample number", show: v => (v < 0 ? "truth" : String(v)) }];
  const first = ["probability", "log_prob", "cluster", "JADE", "JFDE", "collision", "off_road", "infeasible"], place = n => (first.indexOf(n) + 1 || 99);
  for (const name of Object.keys(scores).sort((p, q) => place(p) - place(q))) {
    columns.push({ key: name, label: SHORT[name] || name.replace("satisfied_", "✓ ").replaceAll("_", " "), title: `${name}: ${MEANING[name] || (name.startsWith("satisfied_") ? "1 = the wishes of this kind are met" : "energy, lower is better")}`, down: LARGE_IS_GOOD.has(name),
      ...(name === "probability" ? { bar: v => v / top } : {}), ...(name === "collision" ? { alarm: "bad" } : name === "off_road" ? { alarm: "warn" } : {}) });
  }
  const rows = [...Array(scene.K).keys()].map(k => ({ id: k, ...Object.fromEntries(Object.keys(scores).map(n => [n, scores[n][k]])) }));
  if (scene.truth) rows.push({ id: -1, pinned: true, ...Object.fromEntries(Object.keys(scores).map(n => [n, undefined])), ...scene.meta.truth_scores });
  table.fill(columns, rows, "probability" in scores ? "probability" : "id", "probability" in scores);
  $("ranks-note").textContent = `${scene.K} futures, sort by any column`;
}

function fillHeader(meta, head) {
  $("scene-name").textContent = meta.id; $("scene-name").title = meta.id;
  const dl = $("facts"); dl.replaceChildren();
  for (const [label, value, title] of [["t0", `${meta.t0} (${(meta.t0 * meta.dt).toFixed(1)} s)`, "scene step of the present"], ["dt", number(meta.dt) + " s", "seconds a step"],
    ["N", meta.agents.id.length, "agents"], ["K", meta.K, "joint futures"], ...head]) {
    const div = el("div", { title: title || label }); div.append(el("dt", {}, label), el("dd", {}, String(value))); dl.append(div);
  }
}

function fillSides(meta, side, choose) { // which of two sample sets is shown, and both in figures
  const has = Boolean(meta.other), box = $("sides"); box.hidden = !has; $("compare").hidden = !has;
  if (!has) return;
  box.replaceChildren(...[[1, meta.other.label], [0, meta.label]].map(([s, label]) => {
    const button = el("button", { type: "button", "data-side": s, "aria-pressed": s === side, title: "Show this sample set (c)" }, label);
    button.onclick = () => { choose(s); button.blur(); };
    return button;
  }));
  const body = el("tbody"), head = el("tr"); head.append(el("th"), el("th", {}, meta.other.label), el("th", {}, meta.label));
  for (const [name, there, here] of meta.numbers) {
    const tr = el("tr"); tr.append(el("td", { class: "name", title: name }, name), el("td", {}, there), el("td", {}, here)); body.append(tr);
  }
  const top = el("thead"); top.append(head); $("compare-table").replaceChildren(top, body);
}

function fillWhole(metrics) { // `seqdiff evaluate`'s table in short; rows keep their order until a column is clicked
  $("whole").hidden = !metrics;
  if (!metrics) return;
  const two = v => v.toFixed(2), share = v => (100 * v).toFixed(1) + "%";
  const columns = [{ key: "name", label: "all windows", kind: "name" }, { key: "k", label: "K" }, { key: "minJADE", label: "minJADE", show: two },
    { key: "minJFDE", label: "minJFDE", show: two }, { key: "collision", label: "coll.", show: share }, { key: "off_road", label: "off-rd", show: share }];
  $("whole-note").textContent = metrics.title;
  new Table($("whole-table"), () => {}).fill(columns.filter(c => metrics.rows.some(r => r[c.key] !== null)), metrics.rows.map((r, id) => ({ ...r, id })), "id", false);
}

function fillIncidents(scene, k, jump) {
  const list = $("incident-list"), events = eventsOf(scene, k), meta = scene.meta, ids = meta.agents.id;
  list.replaceChildren();
  $("incidents-title").textContent = "Collisions and off-road";
  $("incidents-note").textContent = k < 0 ? "recorded truth" : "future " + k;
  for (const e of events) {
    const li = el("li", { "data-first": e.first, "data-last": e.last }), when = signed(e.first * meta.dt).replace(" s", "") + (e.last > e.first ? " … " + signed(e.last * meta.dt) : " s");
    const who = e.b >= 0 ? `${ids[e.a]} × ${ids[e.b]}` : ids[e.a];
    li.append(el("span", { class: "when" }, when), el("span", { class: "kind " + e.kind }, e.kind === "collision" ? "collision" : "off-road"), el("span", { class: "who", title: who }, who));
    li.onclick = () => jump(e.first); list.append(li);
  }
  const quiet = text => list.append(el("li", { class: "quiet" }, text));
  if (k < 0 && !scene.truth) quiet("no future picked, and no recorded truth");
  else if (!meta.events) quiet("not computed");
  else if (!events.length) quiet(meta.off_road_known ? "none" : "no collision");
  if (!meta.off_road_known) quiet(meta.map ? "off-road unknown: no drivable area in this map" : "off-road unknown: no map");
  const ticks = $("ticks"), span = scene.H - 1 + scene.T; ticks.replaceChildren();
  const zero = el("b"); zero.style.left = 100 * (scene.H - 1) / span + "%"; ticks.append(zero);
  for (const e of events) {
    const i = el("i", { class: e.kind, title: e.kind });
    i.style.left = 100 * (scene.H - 1 + e.first) / span + "%"; i.style.width = 100 * (e.last - e.first) / span + "%"; ticks.append(i);
  }
}

function fillLayers(scene, layers, change) {
  const meta = scene.meta, kinds = new Set((meta.map || []).map(p => p.kind)), list = $("layer-list"), dash = (color, width, dashes) => `M1 6H25|${color}|${width}|${dashes || ""}`;
  const map = (key, label, has, sign) => [key, label, has, meta.map ? "none" : "map unknown", sign];
  const rows = [
    ["futures", "Futures, darker = likelier", true, "", dash("#3f74c8", 1.6)], ["past", "Past", true, "", dash("#4b5563", 1.5, "4 3")],
    ["truth", "Recorded truth", Boolean(scene.truth), "none", dash("#00896a", 2)], ["marks", "Collisions, off-road", true, "", dash("#d3263a", 2, "1 4")], ["labels", "Agent ids", true, "", ""], null,
    map("drivable", "Drivable area", kinds.has("drivable_area"), dash("#e1e5ea", 9)), map("lane_center", "Lane centres", kinds.has("lane_center"), dash("#aab3bf", 1, "5 4")),
    map("boundary", "Boundaries", kinds.has("lane_boundary") || kinds.has("road_edge"), dash("#8f99a8", 1.3)), map("crosswalk", "Crosswalks", kinds.has("crosswalk"), dash("#c3cad4", 6, "2 2")),
    ["signal", "Signals", meta.signals.length > 0, meta.map ? "none" : "unknown", "M13 6h0|#23a455|9|"],
  ];
  list.replaceChildren();
  for (const row of rows) {
    if (!row) { list.append(el("hr")); continue; }
    const [key, label, has, why, sign] = row, line = el("label", has ? {} : { class: "off" }), input = el("input", { type: "checkbox", "data-layer": key });
    input.checked = has && layers[key]; input.disabled = !has; input.onchange = () => { change(key, input.checked); input.blur(); };
    const icon = svg("svg", {}), [d, stroke, width, dashes] = sign.split("|");
    if (sign) svg("path", { d, stroke, "stroke-width": width, "stroke-dasharray": dashes, fill: "none", "stroke-linecap": key === "signal" ? "round" : "butt" }, icon);
    line.append(input, icon, el("span", {}, label)); if (!has) line.append(el("span", { class: "why" }, why));
    list.append(line);
  }
  list.append(el("hr"));
  const types = el("div", { id: "type-list" });
  for (const type of Object.keys(TYPE_COLOR)) {
    const n = meta.agents.type.filter(t => t === type).length;
    if (!n) continue;
    const item = el("span"), swatch = el("i"); swatch.style.background = TYPE_COLOR[type];
    item.append(swatch, document.createTextNode(`${type} ${n}`)); types.append(item);
  }
  if (meta.focal >= 0) {
    const item = el("span", { title: meta.agents.id[meta.focal] }), swatch = el("i"); swatch.style.border = "1.5px solid #111";
    item.append(swatch, document.createTextNode("focal")); types.append(item);
  }
  list.append(types);
}
