// The bird's-eye view. Plotly draws the futures and owns pan and zoom; two SVG layers in the same metres carry the map
// below and all that moves above, so that a pick or a step never redraws the 64 futures.
const TYPE_COLOR = { vehicle: "#51647f", truck: "#8a6239", bus: "#a8791b", motorcycle: "#7a4fc0", bicycle: "#1f8f9c", pedestrian: "#c0418f", other: "#7d858f" };
const SIGNAL_COLOR = { green: "#23a455", yellow: "#e3b505", red: "#d3263a", unknown: "#9aa4b1", none: "none" };
const MAX_VERTICES = 30000; // with more than this a pan stutters: the drawn lines' tolerance is doubled until they fit, and a note says it
const MARGIN = { l: 46, r: 10, t: 8, b: 30 };
const SVG = "http://www.w3.org/2000/svg";
const $ = id => document.getElementById(id);

function svg(tag, attributes, parent) {
  const node = document.createElementNS(SVG, tag);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (parent) parent.appendChild(node);
  return node;
}

const opacityOf = (p, k) => Math.min(0.95, 0.13 + 1.3 * Math.pow(p === null ? 1 / k : Math.max(p, 0), 2 / 3));

// Appends the line of agent a, no step further than `tolerance` metres from it (Douglas and Peucker 1973), and a gap.
function thinned(scene, k, a, tolerance, x, y) {
  const base = (k * scene.A + a) * scene.T, now = rowAt(scene, k, a, 0), n = scene.T + 1, keep = new Uint8Array(n);
  const px = i => (i ? scene.futures.x[base + i - 1] : now ? now[0] : scene.futures.x[base]), py = i => (i ? scene.futures.y[base + i - 1] : now ? now[1] : scene.futures.y[base]);
  const todo = [[0, n - 1]]; keep[0] = keep[n - 1] = 1;
  while (todo.length) {
    const [i, j] = todo.pop(), dx = px(j) - px(i), dy = py(j) - py(i), l2 = dx * dx + dy * dy;
    let worst = tolerance * tolerance, at = -1;
    for (let m = i + 1; m < j; m++) {
      const ex = px(m) - px(i), ey = py(m) - py(i), u = l2 > 0 ? Math.max(0, Math.min(1, (ex * dx + ey * dy) / l2)) : 0;
      const d2 = (ex - u * dx) ** 2 + (ey - u * dy) ** 2;
      if (d2 > worst) { worst = d2; at = m; }
    }
    if (at > 0) { keep[at] = 1; todo.push([i, at], [at, j]); }
  }
  for (let i = 0; i < n; i++) if (keep[i]) { x.push(px(i)); y.push(py(i)); }
  x.push(NaN); y.push(NaN);
}

class View {
  constructor() {
    this.under = $("under").firstElementChild; this.over = $("over").querySelector(".metres"); this.pixels = $("over").querySelector(".pixels");
    this.pinned = []; this.frame = { s: 1, tx: 0, ty: 0 };
  }

  traces(scene) { // the unpicked futures, thinned; picks and hover work on every step
    const order = [...Array(scene.K).keys()].sort((i, j) => (scene.prob[i] ?? 0) - (scene.prob[j] ?? 0)); // the likely ones on top
    for (scene.tolerance = 0.02; ; scene.tolerance *= 2) {
      let vertices = 0;
      const traces = order.map(k => {
        const x = [], y = [];
        for (let a = 0; a < scene.A; a++) thinned(scene, k, a, scene.tolerance, x, y);
        vertices += x.length;
        return { x, y, mode: "lines", type: "scatter", name: "future " + k, hoverinfo: "skip",
          line: { color: `rgba(63,116,200,${opacityOf(scene.prob[k], scene.K).toFixed(3)})`, // not the trace's opacity: 64 blended layers are slow
            width: 1.3, simplify: false }, connectgaps: false };
      });
      if (vertices <= MAX_VERTICES || scene.tolerance > 0.3) return traces;
    }
  }

  bounds(scene) {
    const b = [Infinity, -Infinity, Infinity, -Infinity];
    for (const from of [scene.past, scene.truth, scene.futures]) {
      if (from) for (let i = 0; i < from.x.length; i++) {
        const x = from.x[i], y = from.y[i];
        if (x < b[0]) b[0] = x; if (x > b[1]) b[1] = x; if (y < b[2]) b[2] = y; if (y > b[3]) b[3] = y;
      }
    }
    return Number.isFinite(b[0]) ? b : [-10, 10, -10, 10];
  }

  ranges(scene) { // everything, 6 % of air, at least 20 m, and the view's own proportions
    const [x0, x1, y0, y1] = this.bounds(scene), box = $("view").getBoundingClientRect();
    const w = Math.max(50, box.width - MARGIN.l - MARGIN.r), h = Math.max(50, box.height - MARGIN.t - MARGIN.b);
    const metre = Math.max(Math.max(20, (x1 - x0) * 1.12) / w, Math.max(20, (y1 - y0) * 1.12) / h);
    const cx = (x0 + x1) / 2, cy = (y0 + y1) / 2;
    return { x: [cx - w * metre / 2, cx + w * metre / 2], y: [cy - h * metre / 2, cy + h * metre / 2] };
  }

  async show(scene, keep) {
    this.scene = scene;
    const now = keep && $("plot")._fullLayout, range = now ? { x: [...now.xaxis.range], y: [...now.yaxis.range] } : this.ranges(scene), axis = { zeroline: false, showgrid: false, ticks: "outside", ticklen: 4, tickcolor: "#cfd5dc",
      tickfont: { size: 10.5, color: "#67717f" }, ticksuffix: " m", showline: true, linecolor: "#d9dee4", mirror: true, nticks: 9 };
    await Plotly.react($("plot"), this.traces(scene), {
      margin: MARGIN, showlegend: false, hovermode: false, dragmode: "pan", paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      xaxis: { ...axis, range: range.x }, yaxis: { ...axis, range: range.y, scaleanchor: "x", scaleratio: 1 },
    }, { scrollZoom: true, displayModeBar: false, responsive: true, doubleClick: false });
    if (!this.listening) {
      this.listening = true;
      for (const name of ["plotly_relayouting", "plotly_relayout", "plotly_afterplot"]) $("plot").on(name, () => this.sync());
    }
    this.drawMap(); this.drawTracks(); this.sync();
  }

  fit() {
    const range = this.ranges(this.scene);
    return Plotly.relayout($("plot"), { "xaxis.range": range.x, "yaxis.range": range.y });
  }

  sync() { // metres to pixels, read from Plotly's axes
    const { xaxis, yaxis, _size: size } = $("plot")._fullLayout, s = xaxis._length / (xaxis.range[1] - xaxis.range[0]);
    for (const layer of [$("under"), $("over")]) {
      Object.assign(layer.style, { left: size.l + "px", top: size.t + "px", width: size.w + "px", height: size.h + "px" });
    }
    const dx = xaxis._offset - size.l, dy = yaxis._offset - size.t;
    this.frame = { s, tx: dx - xaxis.range[0] * s, ty: dy + yaxis._length + yaxis.range[0] * s, left: size.l, top: size.t };
    const matrix = `matrix(${s} 0 0 ${-s} ${this.frame.tx} ${this.frame.ty})`;
    this.under.setAttribute("transform", matrix); this.over.setAttribute("transform", matrix);
    for (const pin of this.pinned) this.pin(pin);
    let metres = 1;
    for (const step of [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]) if (step * s < 150) metres = step;
    $("scale").firstElementChild.style.width = metres * s + "px"; $("scale").lastElementChild.textContent = metres + " m";
  }

  pin(p) { p.node.setAttribute("transform", `translate(${(this.frame.tx + p.x * this.frame.s).toFixed(1)} ${(this.frame.ty - p.y * this.frame.s).toFixed(1)})`); }

  toMetres(event) {
    const box = $("view").getBoundingClientRect(), f = this.frame;
    const px = event.clientX - box.left - f.left, py = event.clientY - box.top - f.top;
    return { x: (px - f.tx) / f.s, y: (f.ty - py) / f.s, metre: 1 / f.s, inside: px >= 0 && py >= 0 && px <= $("over").clientWidth && py <= $("over").clientHeight };
  }

  drawMap() {
    const scene = this.scene, meta = scene.meta; this.under.replaceChildren();
    this.signalNodes = {};
    let at = 0;
    const points = n => { let d = ""; for (const end = at + n; at < end; at++) d += (d ? "L" : "M") + scene.mapX[at] + " " + scene.mapY[at]; return d; };
    for (const piece of meta.map || []) { // rings of one piece share a path, so that holes stay holes
      const closed = piece.kind === "crosswalk" || piece.kind === "drivable_area";
      const d = piece.rings.map(n => points(n) + (closed ? "Z" : "")).join("");
      svg("path", { class: piece.kind, d }, this.under);
      if (piece.signal) this.signalNodes[piece.signal] = svg("path", { class: "signal", d: d.split("L")[0] + "h0" }, this.under);
    }
  }

  polyline(k, a, from, to, scene = this.scene) {
    let d = "", up = true;
    for (let s = from; s <= to; s++) {
      const row = rowAt(scene, k, a, s);
      if (row) d += (up ? "M" : "L") + row[0].toFixed(2) + " " + row[1].toFixed(2);
      up = !row;
    }
    return d;
  }

  drawTracks() { // past, truth, then empty groups for what moves
    const scene = this.scene; this.over.replaceChildren(); this.pixels.replaceChildren(); this.pinned = [];
    for (let a = 0; a < scene.A; a++) {
      svg("path", { class: "past", "data-agent": scene.meta.agents.id[a], d: this.polyline(-1, a, 1 - scene.H, 0) }, this.over);
      if (scene.truth) svg("path", { class: "truth", "data-agent": scene.meta.agents.id[a], d: this.polyline(-1, a, 0, scene.T) }, this.over);
    }
    this.nearGroup = svg("g", {}, this.over); this.pickedGroup = svg("g", { id: "picked" }, this.over);
    this.ghosts = this.boxes("ghost"); this.solid = this.boxes("box");
    this.marks = svg("g", {}, this.pixels); this.labels = [];
    for (let a = 0; a < scene.A; a++) {
      const node = svg("text", { "text-anchor": "middle", dy: -9 }, this.pixels);
      node.textContent = scene.meta.agents.id[a];
      this.labels.push({ node, x: 0, y: 0 });
    }
  }

  boxes(kind) {
    const { box, type, known } = this.scene.meta.agents, group = svg("g", {}, this.over);
    return box.map(([l, w], a) => {
      const g = svg("g", { class: kind + (a === this.scene.meta.focal ? " focal" : "") + (known[a] ? "" : " guess"), "data-agent": this.scene.meta.agents.id[a] }, group);
      const r = Math.min(l, w) / 2, round = type[a] === "pedestrian"; // as the energies see them: discs and boxes
      if (kind === "box" && w < 1) svg("path", { class: "dot", d: "M0 0h0", style: `stroke:${TYPE_COLOR[type[a]]}` }, g); // still seen from far away
      svg("path", { class: "body", d: round ? `M${-r} 0A${r} ${r} 0 1 0 ${r} 0A${r} ${r} 0 1 0 ${-r} 0Z` : `M${-l / 2} ${-w / 2}H${l / 2}V${w / 2}H${-l / 2}Z`,
        ...(kind === "box" ? { style: `fill:${TYPE_COLOR[type[a]]}` } : {}) }, g);
      if (kind === "box") svg("path", { class: "nose", d: `M${l / 2} 0L${l / 2 - Math.min(w * 0.7, l / 2)} ${w * 0.36}V${-w * 0.36}Z` }, g);
      return g;
    });
  }

  pick(k) { // light up every agent of one joint future
    this.pickedGroup.replaceChildren(); this.k = k;
    $("view").classList.toggle("picked", k >= 0);
    if (k >= 0) {
      const lines = this.scene.meta.agents.id.map((id, a) => [id, this.polyline(k, a, 0, this.scene.T)]);
      for (const cls of ["halo", "picked"]) for (const [id, d] of lines) svg("path", { class: cls, "data-agent": id, "data-future": k, d }, this.pickedGroup);
    }
    const pair = this.scene.pair;
    if (pair && k >= 0 && k < pair.K) this.scene.meta.agents.id.forEach((id, a) => this.differs(k, a, pair) && svg("path", { class: "other", "data-agent": id, d: this.polyline(k, a, 0, pair.T, pair) }, this.pickedGroup));
    this.drawMarks(eventsOf(this.scene, k));
  }

  differs(k, a, pair) { // by more than a metre at some step
    for (let s = 1; s <= pair.T; s++) {
      const p = rowAt(this.scene, k, a, s), q = rowAt(pair, k, a, s);
      if (p && q && Math.hypot(p[0] - q[0], p[1] - q[1]) > 1) return true;
    }
    return false;
  }

  near(k) { // a thin preview under the pointer
    if (this.nearK === k) return;
    this.nearK = k; this.nearGroup.replaceChildren();
    if (k >= 0 && k !== this.k) for (let a = 0; a < this.scene.A; a++) svg("path", { class: "near", d: this.polyline(k, a, 0, this.scene.T) }, this.nearGroup);
  }

  drawMarks(events) {
    this.marks.replaceChildren(); this.pinned = [...this.labels];
    this.events = events.map(event => {
      const p = stateAt(this.scene, this.k, event.a, event.first), q = event.b >= 0 ? stateAt(this.scene, this.k, event.b, event.first) : p;
      if (!p || !q) return { event, node: null };
      const node = svg("g", { class: "mark " + event.kind, "data-first": event.first }, this.marks);
      svg("circle", { r: 9 }, node);
      svg("path", { d: event.kind === "collision" ? "M-4 -4L4 4M-4 4L4 -4" : "M0 -5V1.5M0 4V5" }, node);
      const pin = { node, x: (p[0] + q[0]) / 2, y: (p[1] + q[1]) / 2 };
      this.pinned.push(pin); this.pin(pin);
      return { event, node };
    });
  }

  time(s) {
    const scene = this.scene, k = this.k, hit = new Set(), out = new Set();
    for (const { event, node } of this.events) {
      const now = s >= event.first - 1e-6 && s <= event.last + 1e-6;
      if (node) node.classList.toggle("now", now);
      if (now) { (event.kind === "collision" ? hit : out).add(event.a); if (event.b >= 0) hit.add(event.b); }
    }
    for (let a = 0; a < scene.A; a++) {
      const row = this.place(this.solid[a], stateAt(scene, k, a, s));
      this.place(this.ghosts[a], k >= 0 && s > 0 && scene.truth ? stateAt(scene, -1, a, s) : null);
      this.solid[a].classList.toggle("hit", hit.has(a)); this.solid[a].classList.toggle("out", out.has(a));
      const label = this.labels[a]; label.node.style.visibility = row ? "" : "hidden";
      if (row) { label.x = row[0]; label.y = row[1]; this.pin(label); }
    }
    for (const [id, step, state] of scene.meta.signals) if (step <= s && this.signalNodes[id]) this.signalNodes[id].style.stroke = SIGNAL_COLOR[state];
  }

  place(node, row) {
    node.style.display = row ? "" : "none";
    if (row) node.setAttribute("transform", `translate(${row[0].toFixed(3)} ${row[1].toFixed(3)}) rotate(${(row[2] * 180 / Math.PI).toFixed(2)})`);
    return row;
  }
}

function eventsOf(scene, k) { return (k < 0 ? scene.meta.truth_events : (scene.meta.events || [])[k]) || []; }
