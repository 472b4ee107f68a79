// State and what changes it. The body's data attributes (scene, future, step) say where the page stands.
const DATA = JSON.parse($("page-data").textContent);
const state = { side: 0, index: -1, future: -1, step: 0, playing: false, layers: { futures: true, past: true, truth: true, marks: true, labels: false, drivable: true, lane_center: true, boundary: true, crosswalk: true, signal: true } };
const view = new View(), cache = new Map();
const ranks = new Table($("rank-table"), k => pick(k)), scenes = new Table($("scene-table"), i => open(i));
let scene = null;

async function open(index, future, step, keep) {
  play(false);
  const meta = DATA.scenes[index]; state.index = index; scenes.mark(index, true);
  if (!cache.has(index)) {
    if (cache.size >= 4) cache.delete(cache.keys().next().value); // decoded scenes are tens of megabytes
    const main = await decodeScene(meta);
    if (meta.other) await decodeOther(main);
    cache.set(index, main);
  }
  if (state.index !== index) return; // another click came in between
  scene = cache.get(index); if (state.side && scene.pair) scene = scene.pair;
  fillHeader(scene.meta, DATA.head); fillSides(DATA.scenes[index], state.side, side); fillRanks(ranks, scene); fillLayers(scene, state.layers, layer);
  $("time").min = 1 - scene.H; $("time").max = scene.T;
  await view.show(scene, keep);
  const notes = [...meta.notes, ...DATA.notes];
  notes.push(`Unpicked futures are drawn within ${Math.round(100 * scene.tolerance)} cm of every step; the picked one, the marks and the hover use every step.`);
  $("note-list").replaceChildren(...notes.map(text => el("li", {}, text)));
  state.step = step ?? 0;
  for (const key in state.layers) $("view").classList.toggle("no-" + key, !state.layers[key]);
  pick(future !== undefined && future < scene.K ? future : ranks.rows.find(row => row.id >= 0).id);
  $("message").hidden = true; document.body.dataset.ready = index; document.body.dataset.side = state.side;
}

function side(s) { // 1 = the other sample set; time, picked future and frame stay
  if (!scene.pair || s === state.side) return;
  state.side = s; open(state.index, state.future, Math.round(state.step), true);
}

function pick(k) {
  if (k < 0 && !scene.truth) k = -1;
  state.future = k; view.pick(k); ranks.mark(k, true); fillIncidents(scene, k, s => { play(false); moveTo(s); });
  moveTo(state.step);
}

function moveTo(s) {
  state.step = Math.max(1 - scene.H, Math.min(scene.T, s));
  view.time(state.step);
  $("time").value = Math.round(state.step);
  $("clock").textContent = signed(state.step * scene.meta.dt);
  for (const li of $("incident-list").children) li.classList.toggle("now", state.step >= li.dataset.first && state.step <= li.dataset.last);
  Object.assign(document.body.dataset, { scene: state.index, future: state.future, step: Math.round(state.step) });
  clearTimeout(moveTo.later);
  moveTo.later = setTimeout(() => { try { history.replaceState(null, "", `#${state.index},${state.future},${Math.round(state.step)}`); } catch { /* some browsers refuse it for files */ } }, 300);
}

function play(on) {
  state.playing = on; $("play").textContent = on ? "❚❚" : "▶"; $("play").setAttribute("aria-label", on ? "pause" : "play");
  if (!on) { if (scene) moveTo(Math.round(state.step)); return; }
  if (state.step >= scene.T) state.step = 0;
  let before = performance.now();
  const frame = now => {
    if (!state.playing) return;
    const next = state.step + (now - before) / 1000 / scene.meta.dt * Number($("rate").value);
    before = now; moveTo(next);
    if (next >= scene.T) play(false); else requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}

function layer(key, on) { state.layers[key] = on; $("view").classList.toggle("no-" + key, !on); }

function under(event) {
  const at = view.toMetres(event);
  return at.inside ? boxUnder(scene, state.future, state.step, at) || lineUnder(scene, at, state.layers, state.future) : null;
}

function tell(found, event) {
  const tip = $("tip"); tip.hidden = !found; $("plot").style.cursor = found ? "pointer" : "";
  if (!found) return;
  const meta = scene.meta, { a, k, s } = found, v = speedAt(scene, k, a, s), [l, w] = meta.agents.box[a];
  const first = el("div"); first.append(el("b", {}, meta.agents.id[a]), ` · ${meta.agents.type[a]} · ${v === null ? "speed unknown" : v.toFixed(1) + " m/s"}`);
  const whose = s <= 0 ? "past" : k < 0 ? "recorded truth" : `future ${k}` + (scene.prob[k] === null ? "" : `, p ${number(scene.prob[k])}`);
  tip.replaceChildren(first, el("div", {}, `${signed(s * meta.dt)} · ${whose}`),
    el("div", {}, meta.agents.known[a] ? `${l.toFixed(1)} × ${w.toFixed(1)} m` : `size not recorded, drawn ${l.toFixed(1)} × ${w.toFixed(1)} m`));
  const box = $("view").getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  tip.style.left = Math.min(x + 14, box.width - tip.offsetWidth - 6) + "px";
  tip.style.top = (y + 18 + tip.offsetHeight > box.height ? y - tip.offsetHeight - 10 : y + 18) + "px";
}

function watchPointer() {
  const node = $("plot"); let down = null, pending = null;
  node.addEventListener("pointerdown", e => { down = [e.clientX, e.clientY]; }, true);
  addEventListener("pointerup", e => { // not "click": Plotly's drag layer swallows it
    if (!down || !scene || !node.contains(e.target) && !e.target.classList.contains("dragcover")) { down = null; return; }
    const still = Math.hypot(e.clientX - down[0], e.clientY - down[1]) < 4; down = null;
    if (!still) return;
    const start = performance.now(), found = under(e);
    if (found && found.s > 0 && found.what !== "box") { pick(found.k); document.body.dataset.pickMs = (performance.now() - start).toFixed(1); }
  }, true);
  node.addEventListener("mousemove", e => {
    if (!scene || e.buttons) return;
    if (!pending) requestAnimationFrame(() => {
      const last = pending, found = under(last); pending = null; tell(found, last); view.near(found && found.what === "future" ? found.k : -2);
    });
    pending = e;
  });
  node.addEventListener("mouseleave", () => { tell(null); view.near(-2); });
  $("view").addEventListener("dblclick", () => view.fit());
}

function watchKeys() {
  addEventListener("keydown", e => {
    if (!scene || e.ctrlKey || e.metaKey || e.altKey || e.target.tagName === "SELECT") return;
    const step = e.shiftKey ? 5 : 1;
    const act = { ArrowLeft: () => { play(false); moveTo(state.step - step); }, ArrowRight: () => { play(false); moveTo(state.step + step); },
      ArrowUp: () => pick(ranks.next(state.future, -1)), ArrowDown: () => pick(ranks.next(state.future, 1)), " ": () => play(!state.playing), Escape: () => pick(-1),
      f: () => view.fit(), c: () => side(1 - state.side), Home: () => moveTo(1 - scene.H), End: () => moveTo(scene.T), "[": () => open(scenes.next(state.index, -1)), "]": () => open(scenes.next(state.index, 1)) }[e.key];
    if (act && !(e.key === " " && e.target.tagName === "BUTTON" && e.target.id !== "play")) { e.preventDefault(); act(); }
  });
  $("time").addEventListener("input", () => { if (state.playing) play(false); moveTo(Number($("time").value)); });
  $("play").onclick = () => { play(!state.playing); $("play").blur(); };
  $("fit").onclick = () => { view.fit(); $("fit").blur(); };
}

function start() {
  const columns = DATA.scene_columns.map(c => ({ ...c, kind: c.key === "id_text" ? "name" : "",
    show: c.key === "id_text" ? short : c.digits === undefined ? undefined : v => v.toFixed(c.digits) }));
  scenes.fill(columns, DATA.scenes.map((s, i) => ({ id: i, ...s.row })), DATA.sort, DATA.sort_down);
  $("scenes-note").textContent = DATA.scenes_note; document.body.classList.toggle("single", DATA.scenes.length < 2);
  fillWhole(DATA.metrics); watchPointer(); watchKeys();
  addEventListener("hashchange", () => follow());
  return follow() || open(scenes.rows[0].id);
}

function follow() { // #scene,future,step in the address: a link to one view
  const [index, future, step] = location.hash.slice(1).split(",").map(Number), asked = DATA.scenes[index];
  if (!asked || !(future >= -1 && future < asked.K) || !Number.isFinite(step)) return null;
  if (index !== state.index) return open(index, future, step);
  play(false); state.step = step; pick(future);
  return Promise.resolve();
}

start().catch(error => { $("message").hidden = false; $("message").textContent = "This page cannot be shown: " + error.message; throw error; });
