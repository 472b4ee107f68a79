// Undoes seqdiff/viz/pack.py: base64, inflate, byte planes, running sums. Everything here is exact.
const INVALID = -2147483648;

async function inflate(id) {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("This browser is too old to unpack the page: it needs Chrome 80, Firefox 113 or Safari 16.4, or newer.");
  }
  const text = atob(document.getElementById(id).textContent.trim());
  const raw = Uint8Array.from(text, c => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function unpack(bytes, entry) {
  const n = entry.shape.reduce((p, q) => p * q, 1), row = entry.shape[entry.shape.length - 1] || 1, at = entry.at;
  const whole = new Int32Array(n), out = new Float64Array(n);
  for (let i = 0; i < n; i++) {
    whole[i] = bytes[at + i] | bytes[at + n + i] << 8 | bytes[at + 2 * n + i] << 16 | bytes[at + 3 * n + i] << 24;
  }
  for (let pass = 0; pass < entry.order; pass++) {
    for (let i = 0; i < n; i++) if (i % row) whole[i] = whole[i] + whole[i - 1] | 0;
  }
  for (let i = 0; i < n; i++) out[i] = whole[i] === INVALID ? NaN : whole[i] / entry.unit;
  return out;
}

// The scene's tracks: past (a h), truth (a t), futures (k a t), each with x, y, h; and its map as paths.
async function decodeScene(meta) {
  const bytes = await inflate(meta.blob), index = meta.arrays, scene = { meta };
  const three = name => {
    if (!index[name + "x"]) return null;
    return { x: unpack(bytes, index[name + "x"]), y: unpack(bytes, index[name + "y"]), h: unpack(bytes, index[name + "h"]) };
  };
  [scene.K, scene.A, scene.T] = index.fx.shape;
  scene.H = index.px.shape[1];
  scene.futures = three("f"); scene.past = three("p"); scene.truth = three("t");
  scene.mapX = index.mx ? unpack(bytes, index.mx) : []; scene.mapY = index.my ? unpack(bytes, index.my) : [];
  scene.prob = meta.scores.probability || new Array(scene.K).fill(null);
  return scene;
}

// The other sample set of a scene: its own futures and scores, all else shared.
async function decodeOther(main) {
  const other = main.meta.other, bytes = await inflate(other.blob), pair = { ...main, meta: { ...main.meta, ...other } };
  pair.futures = { x: unpack(bytes, other.arrays.fx), y: unpack(bytes, other.arrays.fy), h: unpack(bytes, other.arrays.fh) };
  pair.K = other.K; pair.prob = other.scores.probability || new Array(pair.K).fill(null);
  main.pair = pair; pair.pair = main;
}

// State of agent a at step s (0 = t0, negative = past, fractions are interpolated) in future k; k = -1 is the recorded truth.
function stateAt(scene, k, a, s) {
  const whole = Math.floor(s), part = s - whole, p = rowAt(scene, k, a, whole);
  if (!p || part < 1e-6) return p;
  const q = rowAt(scene, k, a, whole + 1);
  if (!q) return p;
  const turn = Math.atan2(Math.sin(q[2] - p[2]), Math.cos(q[2] - p[2]));
  return [p[0] + part * (q[0] - p[0]), p[1] + part * (q[1] - p[1]), p[2] + part * turn];
}

function rowAt(scene, k, a, s) {
  let from, i;
  if (s <= 0) {
    if (s <= -scene.H) return null;
    from = scene.past; i = a * scene.H + scene.H - 1 + s;
  } else {
    if (s > scene.T) return null;
    from = k < 0 ? scene.truth : scene.futures; i = ((k < 0 ? 0 : k * scene.A) + a) * scene.T + s - 1;
  }
  if (!from || Number.isNaN(from.x[i])) return null;
  return [from.x[i], from.y[i], from.h[i]];
}

// Metres a second, over one step to each side where both are known.
function speedAt(scene, k, a, s) {
  s = Math.round(s);
  let lo = s - 1, hi = s + 1, p = rowAt(scene, k, a, lo), q = rowAt(scene, k, a, hi);
  if (!p) { lo = s; p = rowAt(scene, k, a, s); }
  if (!q) { hi = s; q = rowAt(scene, k, a, s); }
  if (!p || !q || hi === lo) return null;
  return Math.hypot(q[0] - p[0], q[1] - p[1]) / ((hi - lo) * scene.meta.dt);
}
