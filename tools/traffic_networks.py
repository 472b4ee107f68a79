"""Random road networks of five kinds as SUMO plain XML: nodes, edges, connections, and who drives from where to where.

Right-hand traffic. With `spreadType="right"` (SUMO's default) an edge's shape is the left border of its lanes, so the
two directions of a road share one shape, and a lane more on the right leaves the others in place. Metres, radians.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from seqdiff.tools.traffic_geometry import bezier, integrate, offset, pair, unit

KINDS = ("grid", "crossing", "roundabout", "motorway", "curve")
SIDE_ACCELERATION = 2.2  # m/s^2, the comfort limit that sets the speed of a bend
URBAN = {"car": 0.66, "van": 0.08, "truck": 0.06, "bus": 0.04, "motorcycle": 0.07, "bicycle": 0.09}
RURAL = {"car": 0.70, "van": 0.08, "truck": 0.10, "bus": 0.03, "motorcycle": 0.06, "bicycle": 0.03}
FAST = {"car": 0.75, "van": 0.07, "truck": 0.13, "bus": 0.02, "motorcycle": 0.03}


@dataclass
class Node:
    id: str
    xy: tuple[float, float]
    type: str = "priority"
    radius: float = 5.0


@dataclass
class Edge:
    id: str
    start: str
    end: str
    lanes: int
    speed: float
    width: float = 3.3
    priority: int = 2
    shape: np.ndarray | None = None  # [P, 2]; None = straight
    sidewalk: float = 0.0
    bike: float = 0.0
    disallow: str = ""


@dataclass
class Flow:
    """Vehicles that enter on one edge: rate a second, and the edges they leave by with their weights."""

    edge: str
    rate: float
    sinks: dict[str, float]


@dataclass
class Network:
    name: str
    kind: str
    nodes: list[Node]
    edges: list[Edge]
    flows: list[Flow]
    mix: dict[str, float]
    connections: list[tuple[str, str, int, int]] = field(default_factory=list)  # from, to, lane, lane
    roundabout: tuple[list[str], list[str]] | None = None  # its nodes, its edges
    walkers: list[str] = field(default_factory=list)  # edges that people walk from and to
    walker_rate: float = 0.0
    longest: float = 12.0  # metres, of the trucks and buses that this geometry takes
    kerb: float = (
        4.0  # metres, radius that rounds the inner corners of the drivable area; islands narrower than twice it go
    )

    def write(self, folder: Path) -> list[str]:
        """Write the plain XML files into `folder`; the netconvert arguments that read them."""
        nodes = "".join(
            f'<node id="{n.id}" x="{n.xy[0]:.3f}" y="{n.xy[1]:.3f}" type="{n.type}" radius="{n.radius:.2f}"/>\n'
            for n in self.nodes
        )
        edges = "".join(_edge_xml(e) for e in self.edges)
        if self.roundabout is not None:
            edges += f'<roundabout nodes="{" ".join(self.roundabout[0])}" edges="{" ".join(self.roundabout[1])}"/>\n'
        links = "".join(
            f'<connection from="{a}" to="{b}" fromLane="{i}" toLane="{j}"/>\n' for a, b, i, j in self.connections
        )
        args = []
        for key, tag, body in (
            ("node", "nodes", nodes),
            ("edge", "edges", edges),
            ("connection", "connections", links),
        ):
            path = folder / f"net.{key[:3]}.xml"
            path.write_text(f"<{tag}>\n{body}</{tag}>\n")
            args += [f"--{key}-files", str(path)]
        if self.walkers:
            args += ["--crossings.guess", "true", "--walkingareas", "true"]
        return args


def _edge_xml(e: Edge) -> str:
    text = (
        f'<edge id="{e.id}" from="{e.start}" to="{e.end}" numLanes="{e.lanes}" speed="{e.speed:.2f}" '
        f'width="{e.width:.2f}" priority="{e.priority}"'
    )
    if e.shape is not None:
        text += ' shape="' + " ".join(f"{x:.3f},{y:.3f}" for x, y in e.shape) + '"'
    if e.sidewalk:
        text += f' sidewalkWidth="{e.sidewalk:.2f}"'
    if e.bike:
        text += f' bikeLaneWidth="{e.bike:.2f}"'
    if e.disallow:
        text += f' disallow="{e.disallow}"'
    return text + "/>\n"


def make_network(kind: str, name: str, rng: np.random.Generator) -> Network:
    """A random network of one of `KINDS`. The generator's state is the only source of chance."""
    makers: dict[str, Callable[[str, np.random.Generator], Network]] = {
        "grid": _grid,
        "crossing": _crossing,
        "roundabout": _roundabout,
        "motorway": _motorway,
        "curve": _curve,
    }
    if kind not in makers:
        raise ValueError(f"unknown kind of network {kind!r}; expected one of {', '.join(KINDS)}")
    return makers[kind](name, rng)


def _both_ways(a: str, b: str, edge: Edge) -> list[Edge]:
    """`edge` from a to b and the same road from b to a."""
    back = None if edge.shape is None else edge.shape[::-1]
    ways = []
    for start, end, shape in ((a, b, edge.shape), (b, a, back)):
        ways.append(Edge(**{**edge.__dict__, "id": f"{start}_{end}", "start": start, "end": end, "shape": shape}))
    return ways


def _grid(name: str, rng: np.random.Generator) -> Network:
    """Signalised grid: jittered, sheared and turned; streets of one or two lanes; pavements and crossings on most."""
    nx, ny = ((2, 2), (3, 1), (2, 1), (1, 1), (2, 2), (2, 1))[rng.integers(6)]
    turn, shear = rng.uniform(0, math.pi / 2), rng.uniform(-0.2, 0.2)
    ex, ey = unit(turn), unit(turn + math.pi / 2 + shear)
    xs = np.cumsum(np.r_[rng.uniform(80, 110), rng.uniform(90, 150, nx - 1), rng.uniform(80, 110)])
    ys = np.cumsum(np.r_[rng.uniform(80, 110), rng.uniform(90, 150, ny - 1), rng.uniform(80, 110)])
    xs, ys = np.r_[0.0, xs], np.r_[0.0, ys]
    walk = 2.0 if rng.random() < 0.7 else 0.0
    radius = rng.uniform(7.0, 10.0)
    lanes = {("row", j): int(rng.integers(1, 3)) for j in range(1, ny + 1)}
    lanes |= {("col", i): int(rng.integers(1, 3)) for i in range(1, nx + 1)}
    bike = (
        1.8 if rng.random() < 0.35 else 0.0
    )  # on all streets or none: netconvert joins bicycle lanes to bicycle lanes
    speed = {key: float(rng.choice([8.33, 11.11, 13.89])) for key in lanes}
    width = rng.uniform(3.3, 3.6)
    nodes, edges = [], []
    for i in range(nx + 2):
        for j in range(ny + 2):
            inner_i, inner_j = 0 < i <= nx, 0 < j <= ny
            if inner_i or inner_j:
                p = xs[i] * ex + ys[j] * ey + (rng.uniform(-7, 7, 2) if inner_i and inner_j else 0.0)
                light = "traffic_light" if inner_i and inner_j else "priority"
                nodes.append(Node(f"n{i}{j}", pair(p), light, radius))
    ids = {n.id for n in nodes}
    for key, line, across in [("row", j, False) for j in range(1, ny + 1)] + [
        ("col", i, True) for i in range(1, nx + 1)
    ]:
        count = (ny if across else nx) + 1
        for k in range(count):
            a, b = (f"n{line}{k}", f"n{line}{k + 1}") if across else (f"n{k}{line}", f"n{k + 1}{line}")
            if a in ids and b in ids:
                street = Edge("", a, b, lanes[key, line], speed[key, line], width, 2, None, walk, bike)
                edges += _both_ways(a, b, street)
    rim = [n.id for n in nodes if n.type == "priority"]
    rate = rng.uniform(0.06, 0.12)
    return Network(
        name, "grid", nodes, edges, _rim_flows(edges, rim, rate, rng), URBAN,
        walkers=[e.id for e in edges if walk], walker_rate=rng.uniform(0.08, 0.2) if walk else 0.0, longest=10.0,
    )  # fmt: skip


def _rim_flows(edges: list[Edge], rim: list[str], rate: float, rng: np.random.Generator) -> list[Flow]:
    """Traffic from each rim node to every other one, with random weights; a lane more carries more."""
    sinks = {e.end: e.id for e in edges if e.end in rim}
    flows = []
    for e in edges:
        if e.start in rim:
            weights = {edge: float(rng.uniform(0.3, 1.5)) for node, edge in sinks.items() if node != e.start}
            flows.append(Flow(e.id, rate * (1 + 0.6 * (e.lanes - 1)) * rng.uniform(0.6, 1.4), weights))
    return flows


def _crossing(name: str, rng: np.random.Generator) -> Network:
    """One crossing without signals, three to five arms at uneven angles, of any right-of-way rule."""
    arms = int(rng.choice([3, 4, 4, 4, 5]))
    rule = str(rng.choice(["priority", "priority_stop", "right_before_left", "allway_stop"]))
    base = rng.uniform(0, 2 * math.pi)
    angles = base + 2 * math.pi * (np.arange(arms) + rng.uniform(-0.14, 0.14, arms)) / arms
    main = {0, arms // 2}
    main_lanes = 2 if rng.random() < 0.4 and rule.startswith("priority") else 1
    walk = 2.0 if rng.random() < 0.5 else 0.0
    width = rng.uniform(3.3, 3.8)
    nodes = [Node("c", (0.0, 0.0), rule, rng.uniform(7.0, 11.0))]
    edges: list[Edge] = []
    for k, angle in enumerate(angles):
        length, bend = rng.uniform(110, 170), rng.uniform(-0.25, 0.25)
        far = length * unit(angle + bend)
        shape = bezier([np.zeros(2), 0.55 * length * unit(angle), far])
        nodes.append(Node(f"a{k}", pair(far)))
        speed = float(rng.choice([11.11, 13.89, 16.67] if k in main else [8.33, 11.11, 13.89]))
        lanes, rank = (main_lanes, 4) if k in main else (1, 2)
        rank = 2 if rule in ("right_before_left", "allway_stop") else rank
        edges += _both_ways("c", f"a{k}", Edge("", "c", f"a{k}", lanes, speed, width, rank, shape, walk))
    rim = [f"a{k}" for k in range(arms)]
    rate = rng.uniform(0.05, 0.11) * (4 / arms) ** 0.5
    return Network(
        name, "crossing", nodes, edges, _rim_flows(edges, rim, rate, rng), URBAN,
        walkers=[e.id for e in edges if walk], walker_rate=rng.uniform(0.05, 0.12) if walk else 0.0, longest=10.0,
    )  # fmt: skip


def _roundabout(name: str, rng: np.random.Generator) -> Network:
    """A ring of one or two lanes, three to five arms; each arm leaves and enters the ring at two points of its own."""
    arms = int(rng.choice([3, 4, 4, 5]))
    lanes = 2 if rng.random() < 0.35 else 1
    inner = rng.uniform(11, 17) + 2.0 * (arms - 3) + 5.0 * (lanes - 1)
    width = 4.6 if lanes == 1 else 4.0
    outer = inner + lanes * width
    angles = rng.uniform(0, 2 * math.pi) + 2 * math.pi * (np.arange(arms) + rng.uniform(-0.1, 0.1, arms)) / arms
    gap = rng.uniform(7.5, 9.5) / outer  # half the angle between an arm's exit and its entry
    ring_speed = math.sqrt(SIDE_ACCELERATION * (inner + width / 2))
    nodes, edges, rim, ring = [], [], [], []
    for k, angle in enumerate(angles):
        nodes += [Node(f"x{k}", pair(inner * unit(angle - gap)), radius=3.0)]
        nodes += [Node(f"e{k}", pair(inner * unit(angle + gap)), radius=3.0)]
        ring += [(angle - gap, f"x{k}"), (angle + gap, f"e{k}")]
        hub, far = (
            (outer + rng.uniform(28, 40)) * unit(angle),
            rng.uniform(120, 170) * unit(angle + rng.uniform(-0.2, 0.2)),
        )
        nodes += [Node(f"p{k}", pair(hub)), Node(f"a{k}", pair(far))]
        rim.append(f"a{k}")
        arm_lanes = lanes if rng.random() < 0.7 else 1
        speed = float(rng.choice([11.11, 13.89, 16.67]))
        road = Edge("", f"p{k}", f"a{k}", arm_lanes, speed, 3.5, 2, bezier([hub, hub + 25 * unit(angle), far]))
        edges += _both_ways(f"p{k}", f"a{k}", road)
        slant = rng.uniform(0.75, 0.95)  # from the radius towards the direction of the ring
        for enter in (True, False):
            side = gap if enter else -gap
            point = inner * unit(angle + side)
            reach = (width * lanes + 14.0) * unit(angle + side - math.copysign(slant, side) * 0.75)
            shape = bezier([hub, hub - 12 * unit(angle), point + reach, point])
            a, b = (f"p{k}", f"e{k}") if enter else (f"x{k}", f"p{k}")
            edges.append(Edge(f"{a}_{b}", a, b, arm_lanes, 9.0, 3.8, 1, shape if enter else shape[::-1]))
    ring_edges = []
    for (from_angle, a), (to_angle, b) in zip(ring, ring[1:] + [(ring[0][0] + 2 * math.pi, ring[0][1])]):
        shape = np.array([inner * unit(t) for t in np.linspace(from_angle, to_angle, 12)])
        edges.append(Edge(f"{a}_{b}", a, b, lanes, ring_speed, width, 5, shape))
        ring_edges.append(f"{a}_{b}")
    flows = _rim_flows(edges, rim, rng.uniform(0.07, 0.14) * (4 / arms) ** 0.5, rng)
    return Network(
        name,
        "roundabout",
        nodes,
        edges,
        flows,
        URBAN,
        roundabout=([n for _, n in ring], ring_edges),
        longest=10.0,
        kerb=1.5,
    )


def _motorway(name: str, rng: np.random.Generator) -> Network:
    """A carriageway of two to four lanes with a merge and an exit: apart, woven into one lane, or the exit first."""
    lanes, width = int(rng.integers(2, 5)), rng.uniform(3.5, 3.75)
    form = ("apart", "weave", "exit_first")[rng.integers(3)]
    speed, ramp_speed = float(rng.choice([22.22, 27.78, 33.33])), float(rng.choice([13.89, 16.67, 19.44]))
    aux = rng.uniform(180, 260)
    parts = {
        "apart": [(rng.uniform(180, 240), "", ""), (aux, "on", ""), (rng.uniform(120, 220), "", ""), (aux, "", "off")],
        "weave": [(rng.uniform(200, 280), "", ""), (aux * 1.6, "on", "off")],
        "exit_first": [
            (rng.uniform(150, 220), "", ""),
            (aux, "", "off"),
            (rng.uniform(320, 380), "", ""),
            (aux, "on", ""),
        ],
    }[form]
    parts.append((rng.uniform(180, 240), "", ""))
    cuts = np.cumsum([0.0] + [p[0] for p in parts])
    s = np.linspace(0.0, cuts[-1], 400)
    curvature = rng.uniform(-1, 1) / rng.uniform(500, 1500) * np.sin(np.pi * s / cuts[-1] * rng.uniform(0.6, 2.0))
    line = integrate(s, curvature, rng.uniform(0, 2 * math.pi))

    def at(t: np.ndarray) -> np.ndarray:
        return np.stack([np.interp(t, s, line[:, 0]), np.interp(t, s, line[:, 1])], axis=1)

    no_slow, net_edges, links = "bicycle pedestrian moped", [], []
    nodes = [Node(f"m{i}", pair(at(np.array([c]))[0]), radius=1.5) for i, c in enumerate(cuts)]
    for i, (_, on, off) in enumerate(parts):
        shape = at(np.linspace(cuts[i], cuts[i + 1], 20))
        count = lanes + bool(on or off)
        net_edges.append(Edge(f"m{i}", f"m{i}", f"m{i + 1}", count, speed, width, 6, shape, disallow=no_slow))
        links += _joints(parts, i, lanes) if i else []
        border = offset(at(np.linspace(0, cuts[-1], 400)), lanes * width)
        for ramp, here in ((on, cuts[i]), (off, cuts[i + 1])):
            if ramp:
                k = int(np.argmin(np.abs(s - here)))
                way = -1 if ramp == "on" else 1
                ahead = line[min(k + 1, 399)] - line[max(k - 1, 0)]
                ahead /= np.linalg.norm(ahead)
                out = np.array([ahead[1], -ahead[0]])
                reach, wide = rng.uniform(110, 150), rng.uniform(20, 30)
                u = np.linspace(1.0, 0.0, 17)[:, None]
                shape = border[k] + way * reach * u * ahead + wide * (1 - np.cos(0.5 * math.pi * u)) * out
                nodes.append(Node(f"r{ramp}", pair(shape[0])))
                a, b = (f"r{ramp}", f"m{i}") if ramp == "on" else (f"m{i + 1}", f"r{ramp}")
                shape = shape if ramp == "on" else shape[::-1]
                net_edges.append(Edge(ramp, a, b, 1, ramp_speed, width, 3, shape, disallow=no_slow))
    last, base = f"m{len(parts) - 1}", rng.uniform(0.13, 0.22) * lanes
    sinks = {last: 0.8, "off": 0.2}
    flows = [
        Flow("m0", base, sinks),
        Flow("on", rng.uniform(0.06, 0.13), {last: 1.0} if form == "exit_first" else sinks),
    ]
    if rng.random() < 0.5:
        back = offset(line, -rng.uniform(3.0, 8.0))[::-8]
        nodes += [Node("o0", pair(back[0])), Node("o1", pair(back[-1]))]
        net_edges.append(Edge("o0", "o0", "o1", lanes, speed, width, 6, back, disallow=no_slow))
        flows.append(Flow("o0", base * 0.8, {"o0": 1.0}))
    return Network(name, "motorway", nodes, net_edges, flows, FAST, links, kerb=1.0)


def _joints(parts: list[tuple[float, str, str]], i: int, lanes: int) -> list[tuple[str, str, int, int]]:
    """Which lane of part i-1 (and of the ramps here) goes on into which lane of part i; lane 0 is the rightmost.

    An exit lane begins beside the right lane: one changes into it, for a link across would be a jump of a lane's width.
    """
    before, after = parts[i - 1], parts[i]
    wide_before, wide_after = bool(before[1] or before[2]), bool(after[1] or after[2])
    a, b = f"m{i - 1}", f"m{i}"
    links = [(a, b, k + wide_before, k + wide_after) for k in range(lanes)]
    if after[1]:
        links.append(("on", b, 0, 0))
    if before[2]:
        links.append((a, "off", 0, 0))
    return links


def _curve(name: str, rng: np.random.Generator) -> Network:
    """A winding road of one lane each way; an edge's limit follows its tightest bend; on half of them a side road."""
    limit = float(rng.choice([13.89, 16.67, 19.44, 22.22]))
    tight = float(rng.uniform(28, 90))
    s_parts, k_parts, heading, s0, side = [], [], 0.0, 0.0, float(rng.choice([-1, 1]))
    while s0 < 480:
        turn = side * min(rng.uniform(0.4, 1.3), 1.15 - side * heading)
        radius = tight * rng.uniform(1.0, 2.5)
        arc = 1.5 * abs(turn) * radius  # about what the sin^2 profile needs to keep near `radius`
        s = s0 + np.arange(0.0, arc, 2.0)
        peak = 2 * turn / arc
        s_parts.append(s)
        k_parts.append(peak * np.sin(np.pi * (s - s0) / arc) ** 2)
        straight = rng.uniform(10, 60)
        s_parts.append(s0 + arc + np.arange(0.0, straight, 2.0))
        k_parts.append(np.zeros(len(s_parts[-1])))
        heading, s0, side = heading + turn, s0 + arc + straight, -side
    s, curvature = np.concatenate(s_parts), np.concatenate(k_parts)
    line = integrate(s, curvature, rng.uniform(0, 2 * math.pi))
    count = max(6, round(s[-1] / 70))
    cuts = np.linspace(0, len(s) - 1, count + 1).round().astype(int)
    width = rng.uniform(3.2, 3.7)
    nodes = [Node(f"n{i}", pair(line[c]), radius=1.5) for i, c in enumerate(cuts)]
    edges: list[Edge] = []
    for i in range(count):
        piece = slice(cuts[i], cuts[i + 1] + 1)
        bend = float(np.abs(curvature[piece]).max())
        speed = min(limit, math.sqrt(SIDE_ACCELERATION / max(bend, 1e-4)))
        edges += _both_ways(f"n{i}", f"n{i + 1}", Edge("", "", "", 1, speed, width, 5, line[piece]))
    rim = ["n0", f"n{count}"]
    if rng.random() < 0.5:
        joint = int(rng.integers(2, count - 1))
        p, d = line[cuts[joint]], line[cuts[joint] + 1] - line[cuts[joint] - 1]
        angle = math.atan2(d[1], d[0]) + (1 if curvature[cuts[joint]] <= 0 else -1) * rng.uniform(1.2, 1.9)
        far = p + rng.uniform(70, 110) * unit(angle)
        nodes[joint].radius = 7.0
        nodes.append(Node("side", pair(far)))
        edges += _both_ways(f"n{joint}", "side", Edge("", "", "", 1, 11.11, width, 2))
        rim.append("side")
    flows = _rim_flows(edges, rim, rng.uniform(0.13, 0.21), rng)
    for flow in flows:  # a side road takes little of the traffic, else who waits to turn left blocks the only lane
        flow.rate *= 0.4 if flow.edge.startswith("side") else 1.0
        flow.sinks = {edge: weight * (0.25 if edge.endswith("side") else 1.0) for edge, weight in flow.sinks.items()}
    return Network(name, "curve", nodes, edges, flows, RURAL)
