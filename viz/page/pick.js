// What is under the pointer: a box first, then the nearest piece of line in full resolution.
const REACH = 7; // pixels

function boxUnder(scene, k, s, at) {
  for (let a = scene.A - 1; a >= 0; a--) {
    const row = stateAt(scene, k, a, s);
    if (!row) continue;
    const dx = at.x - row[0], dy = at.y - row[1], c = Math.cos(row[2]), n = Math.sin(row[2]), [l, w] = scene.meta.agents.box[a];
    const slack = 2 * at.metre;
    if (Math.abs(dx * c + dy * n) <= l / 2 + slack && Math.abs(dy * c - dx * n) <= w / 2 + slack) return { what: "box", k, a, s, gap: 0 };
  }
  return null;
}

function gapTo(p, q, at) { // squared distance from a point to a piece of line
  const dx = q[0] - p[0], dy = q[1] - p[1], l2 = dx * dx + dy * dy;
  const u = l2 > 0 ? Math.max(0, Math.min(1, ((at.x - p[0]) * dx + (at.y - p[1]) * dy) / l2)) : 0;
  const ex = p[0] + u * dx - at.x, ey = p[1] + u * dy - at.y;
  return ex * ex + ey * ey;
}

function lineUnder(scene, at, shown, picked) {
  const reach2 = (REACH * at.metre) ** 2, { x: fx, y: fy } = scene.futures;
  let best = null, least = reach2;
  const offer = (what, k, a, s, d2, edge) => { if (d2 + 1e-12 < least * edge) { least = d2; best = { what, k, a, s }; } };
  const scan = (what, k, a, from, to) => {
    let p = rowAt(scene, k, a, from);
    for (let s = from + 1; s <= to; s++) {
      const q = rowAt(scene, k, a, s);
      if (p && q) offer(what, k, a, s, gapTo(p, q, at), 1);
      p = q;
    }
  };
  for (let a = 0; a < scene.A; a++) {
    if (picked >= 0) scan("future", picked, a, 0, scene.T);
    if (shown.truth && scene.truth) scan("truth", -1, a, 0, scene.T);
    if (shown.past) scan("past", -1, a, 1 - scene.H, 0);
  }
  if (best || !shown.futures) return best; // what is drawn on top wins
  for (let k = 0; k < scene.K; k++) {
    for (let a = 0; a < scene.A; a++) {
      const base = (k * scene.A + a) * scene.T, now = rowAt(scene, k, a, 0);
      let px = now ? now[0] : fx[base], py = now ? now[1] : fy[base];
      for (let t = 0; t < scene.T; t++) {
        const qx = fx[base + t], qy = fy[base + t];
        const far = REACH * at.metre;
        if (!(Math.min(px, qx) > at.x + far || Math.max(px, qx) < at.x - far || Math.min(py, qy) > at.y + far || Math.max(py, qy) < at.y - far)) {
          const d2 = gapTo([px, py], [qx, qy], at), likely = (scene.prob[k] ?? 0) > (scene.prob[best ? best.k : k] ?? 0);
          if (d2 < least || (best && likely && d2 < reach2 / 12 && least < reach2 / 12)) { least = d2; best = { what: "future", k, a, s: t + 1 }; }
        }
        px = qx; py = qy;
      }
    }
  }
  return best;
}
