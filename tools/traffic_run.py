"""One run of traffic on one network: demand, SUMO, and SUMO's front bumpers turned into moving boxes.

SUMO gives the middle of the front bumper, which follows the lane, and an angle clockwise from north. Here the bumper's
path is smoothed over 0.2 s, the front axle follows that path, the rear axle follows the front axle as a trailer its
tow bar (a tractrix: rear wheels do not slip sideways, the kinematic bicycle model); the box lies along both.
So a long truck swings out and cuts in as on the road, the heading has no jumps where lanes join, and who stands stays.
"""

from __future__ import annotations

import math
import re
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from seqdiff.domains.trajectory.scene import Track
from seqdiff.tools.traffic_networks import Flow, Network

DT = 0.1
LEAD_S = 4.0  # recorded ahead of a scene, so that smoothing and trailing have a past at its first step
SMOOTH_S = 0.2
WALK_SMOOTH_S = 0.3
WALK_JUMP, DRIVE_JUMP = 1.0, 6.5  # metres in one step that nobody walks or drives
OVERHANG, WHEELBASE = 0.22, 0.56  # front axle behind the bumper, rear axle behind the front one: shares of the length
STYLES = 6  # drivers of each class in a run's pool

# class: our type, SUMO's vClass, length, width, top speed m/s, acceleration, braking (low, high)
Range = tuple[float, float]
CLASSES: dict[str, tuple[str, str, Range, Range, Range, Range]] = {
    "car": ("vehicle", "passenger", (3.8, 5.0), (1.70, 1.92), (36, 50), (1.6, 3.0)),
    "van": ("vehicle", "delivery", (5.2, 6.2), (1.95, 2.10), (30, 40), (1.4, 2.2)),
    "truck": ("truck", "truck", (7.0, 12.0), (2.35, 2.50), (23, 26), (0.8, 1.3)),
    "bus": ("bus", "bus", (9.0, 12.0), (2.50, 2.55), (23, 28), (0.9, 1.3)),
    "motorcycle": ("motorcycle", "motorcycle", (2.0, 2.3), (0.75, 0.90), (36, 50), (2.0, 4.0)),
    "bicycle": ("bicycle", "bicycle", (1.65, 1.90), (0.55, 0.70), (3.8, 7.0), (0.8, 1.3)),
}
BRAKING = {"truck": (3.0, 4.0), "bus": (3.0, 3.8), "bicycle": (2.5, 3.5)}
PEDESTRIAN_SIZE = (0.4, 0.5)


class SumoError(RuntimeError):
    """SUMO is not installed, or one of its programs stopped with an error. The text holds its message."""


@dataclass
class Run:
    """What SUMO recorded of one run."""

    tracks: list[Track]
    signals: list[tuple[str, int, str]]  # traffic light, step, its state string from then on
    statistics: dict[str, int]  # SUMO's own counts: teleports, collisions, emergency braking


def sumo_program(name: str) -> str:
    """Path of one of SUMO's programs in the eclipse-sumo package.

    Raises SumoError: the package is missing.
    """
    try:
        import sumo
    except ImportError as error:
        raise SumoError("SUMO is not installed; recording needs it: `pip install seqdiff[traffic]`") from error
    return str(Path(sumo.SUMO_HOME) / "bin" / name)


def call(program: str, args: list[str]) -> None:
    """Run one SUMO program; SumoError with its last lines when it fails."""
    done = subprocess.run([sumo_program(program), *args], capture_output=True, text=True)
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).splitlines()[-12:])
        raise SumoError(f"{program} stopped with {done.returncode}:\n{tail}")


def build_network(network: Network, folder: Path) -> Path:
    """netconvert: the network's plain XML -> `folder`/net.net.xml."""
    out = folder / "net.net.xml"
    call("netconvert", [
        *network.write(folder), "--output-file", str(out), "--offset.disable-normalization", "true",
        "--no-turnarounds", "true", "--junctions.corner-detail", "8", "--junctions.internal-link-detail", "14",
        "--junctions.limit-turn-speed", "3.0", "--junctions.limit-turn-speed.min-angle", "4",
        "--geometry.max-angle", "180", "--geometry.min-radius", "0",
        "--tls.cycle.time", "50", "--tls.yellow.time", "3", "--tls.allred.time", "2", "--tls.left-green.time", "5",
        "--check-lane-foes.all", "true", "--no-warnings", "true", "--output.street-names", "false",
        "--opposites.guess", "false", "--precision", "3",
    ])  # fmt: skip
    return out


def _driver_types(network: Network, rng: np.random.Generator) -> str:
    """vType elements: `STYLES` drivers of each class, each with its own body, car-following model and habits."""
    text = []
    for name, share in network.mix.items():
        if share <= 0:
            continue
        _, vclass, (l0, l1), (w0, w1), top, acceleration = CLASSES[name]
        for k in range(STYLES):
            u = rng.uniform
            model = "IDM" if name == "bicycle" else ("EIDM", "IDM", "Krauss")[k % 3]
            length = min(u(l0, l1), network.longest) if l1 > 7 else u(l0, l1)
            narrow = min(e.width for e in network.edges)
            edge_side = f"{0.55 - 0.5 * narrow:.2f}" if not any(e.bike for e in network.edges) else "center"
            align = edge_side if name == "bicycle" else "center"
            text.append(
                f'<vType id="{name}_{k}" vClass="{vclass}" length="{length:.2f}" width="{u(w0, w1):.2f}" '
                f'maxSpeed="{u(*top):.2f}" accel="{u(*acceleration):.2f}" '
                f'decel="{u(*BRAKING.get(name, (3.5, 5.0))):.2f}" emergencyDecel="8.0" '
                f'minGap="{u(1.5, 3.0):.2f}" tau="{u(1.0, 1.9):.2f}" speedFactor="{u(0.82, 1.12):.3f}" '
                f'speedDev="0.04" carFollowModel="{model}" '
                + (f'sigma="{u(0.1, 0.6):.2f}" sigmaStep="1.0" ' if model == "Krauss" else "")
                + f'latAlignment="{align}" minGapLat="{u(0.45, 0.8):.2f}" '
                f'maxSpeedLat="{u(0.9, 1.5):.2f}" lcAccelLat="{u(0.5, 0.9):.2f}" '
                f'lcMaxSpeedLatStanding="0.0" lcMaxSpeedLatFactor="0.15" lcSpeedGain="{u(0.5, 2.0):.2f}" '
                f'lcKeepRight="{u(0.2, 1.2):.2f}" lcCooperative="{u(0.6, 1.0):.2f}" lcAssertive="{u(0.8, 1.3):.2f}" '
                f'jmTimegapMinor="{u(1.2, 2.5):.2f}" jmStoplineGap="{u(0.6, 1.6):.2f}" impatience="{u(0.0, 0.4):.2f}"/>'
            )
    for k in range(STYLES):
        length, width = PEDESTRIAN_SIZE
        text.append(
            f'<vType id="pedestrian_{k}" vClass="pedestrian" length="{length}" width="{width}" minGap="0.3" '
            f'desiredMaxSpeed="{rng.uniform(0.9, 1.8):.2f}" speedDev="0.05"/>'
        )
    return "\n".join(text)


def _arrivals(rate: float, end: float, rng: np.random.Generator) -> list[float]:
    """Times of entry: gaps exponential above a headway of one second."""
    times, t = [], rng.exponential(1.0 / rate)
    while t < end:
        times.append(float(t))
        t += 1.0 + rng.exponential(max(1.0 / rate - 1.0, 0.1))
    return times


def _trip(flow: Flow, t: float, network: Network, rng: np.random.Generator) -> tuple[float, str]:
    names = [n for n in network.mix if network.mix[n] > 0]
    share = np.array([network.mix[n] for n in names])
    name = names[rng.choice(len(names), p=share / share.sum())]
    sinks = list(flow.sinks)
    weight = np.array([flow.sinks[s] for s in sinks])
    sink = sinks[rng.choice(len(sinks), p=weight / weight.sum())]
    style, stays, wait = int(rng.integers(STYLES)), rng.random(), rng.uniform(6, 15)
    edge = next(e for e in network.edges if e.id == flow.edge)
    lane = "best" if network.kind != "motorway" or name in ("truck", "bus") else ("best", "free")[int(rng.integers(2))]
    stop = ""
    if name == "bus" and stays < 0.5 and network.kind in ("grid", "curve"):
        first = bool(edge.sidewalk) + bool(edge.bike)
        stop = f'<stop lane="{edge.id}_{first}" endPos="40" duration="{wait:.1f}"/>'
    sideways = "right" if name == "bicycle" and not edge.bike else "center"
    return t, (
        f'type="{name}_{style}" depart="{t:.1f}" from="{flow.edge}" to="{sink}" departLane="{lane}" departSpeed="max" '
        f'departPosLat="{sideways}">{stop}</trip>'
    )


def write_demand(network: Network, path: Path, end: float, rng: np.random.Generator) -> None:
    """Trips and walks until `end` seconds, sorted by departure, with the driver types they use."""
    rows: list[tuple[float, str, str]] = []
    for flow in network.flows:
        for t in _arrivals(flow.rate, end, rng):
            rows.append((*_trip(flow, t, network, rng), "trip"))
    if network.walkers:
        for t in _arrivals(network.walker_rate, end, rng):
            a, b = rng.choice(network.walkers, 2, replace=False)
            k = int(rng.integers(STYLES))
            rows.append((t, f'type="pedestrian_{k}" depart="{t:.1f}" departPos="random"><walk from="{a}" to="{b}" '
                         f'arrivalPos="random"/></person>', "person"))  # fmt: skip
    rows.sort(key=lambda r: r[0])
    body = "\n".join(f'<{tag} id="{tag[0]}{i}" {text}' for i, (_, text, tag) in enumerate(rows))
    path.write_text(f"<routes>\n{_driver_types(network, rng)}\n{body}\n</routes>\n")


def simulate(network: Network, net: Path, folder: Path, warm_s: float, seconds: float, seed: int) -> Run:
    """Drive the network for `warm_s` and record `seconds` of it; the same seed gives the same run.

    Raises SumoError when SUMO stops.
    """
    rng = np.random.default_rng(seed)
    end = warm_s + seconds
    write_demand(network, folder / "demand.xml", end, rng)
    lights = sorted(set(re.findall(r'<tlLogic id="([^"]+)"', net.read_text())))
    more = "".join(f'<timedEvent type="SaveTLSStates" source="{t}" dest="{folder / "tls.xml"}"/>' for t in lights)
    (folder / "more.xml").write_text(f"<additional>{more}</additional>")
    call("sumo", [
        "--net-file", str(net), "--route-files", str(folder / "demand.xml"),
        "--additional-files", str(folder / "more.xml"),
        "--step-length", str(DT), "--end", f"{end + LEAD_S:.1f}", "--seed", str(seed), "--lateral-resolution", "0.8",
        "--fcd-output", str(folder / "fcd.xml"), "--device.fcd.begin", f"{warm_s - LEAD_S:.1f}", "--precision", "4",
        "--fcd-output.attributes", "x,y,angle,type", "--time-to-teleport", "-1", "--collision.action", "none",
        "--collision.check-junctions", "true", "--statistic-output", str(folder / "stat.xml"), "--no-step-log", "true",
        "--no-warnings", "true", "--pedestrian.model", "striping", "--pedestrian.striping.stripe-width", "0.65",
        "--default.speeddev", "0.05",
    ])  # fmt: skip
    rows = _read_fcd(folder / "fcd.xml")
    sizes = _sizes(folder / "demand.xml")
    steps = round(seconds / DT)
    first = round(warm_s / DT)
    tracks = []
    statistics = _read_statistics(folder / "stat.xml") | {"tracks cut at a jump": 0}
    for name in sorted(rows, key=lambda n: (n[0], int(n[1:]))):
        whole = np.array(rows[name][1])
        table = without_jump(whole, WALK_JUMP if name[0] == "p" else DRIVE_JUMP, first, steps)
        statistics["tracks cut at a jump"] += len(table) < len(whole)
        track = _track(name, rows[name][0], table, sizes, (first, steps))
        if track is not None:
            tracks.append(track)
    return Run(tracks, _read_lights(folder / "tls.xml", lights, first, steps), statistics)


def _sizes(demand: Path) -> dict[str, tuple[float, float]]:
    root = ET.parse(demand).getroot()
    return {t.attrib["id"]: (float(t.attrib["length"]), float(t.attrib["width"])) for t in root.iter("vType")}


def _read_fcd(path: Path) -> dict[str, tuple[str, list[tuple[int, float, float, float]]]]:
    """{name: (vType, rows of step, x, y, angle)} of SUMO's floating-car file."""
    rows: dict[str, tuple[str, list[tuple[int, float, float, float]]]] = {}
    step = 0
    for _, node in ET.iterparse(path, events=("start",)):
        if node.tag == "timestep":
            step = round(float(node.attrib["time"]) / DT)
        elif node.tag in ("vehicle", "person"):
            a = node.attrib
            if a["id"] not in rows:
                rows[a["id"]] = (a["type"], [])
            rows[a["id"]][1].append((step, float(a["x"]), float(a["y"]), float(a["angle"])))
            node.clear()
    return rows


def _read_lights(path: Path, lights: list[str], first: int, steps: int) -> list[tuple[str, int, str]]:
    """Changes of the lights' state strings within the scene, the state at its first step included."""
    changes: list[tuple[str, int, str]] = []
    last: dict[str, str] = {}
    if not lights:
        return []
    for node in ET.parse(path).getroot().iter("tlsState"):
        step = round(float(node.attrib["time"]) / DT) - first
        light, state = node.attrib["id"], node.attrib["state"]
        if step < steps and last.get(light) != state:
            last[light] = state
            changes.append((light, max(step, 0), state))
    # of the changes before the scene only the last counts
    kept = {(light, step): (light, step, state) for light, step, state in changes}
    return sorted(kept.values(), key=lambda c: (c[1], c[0]))


def _read_statistics(path: Path) -> dict[str, int]:
    root = ET.parse(path).getroot()
    counts = {}
    for tag, keys in (("teleports", ("total",)), ("safety", ("collisions", "emergencyStops", "emergencyBraking"))):
        node = root.find(tag)
        for key in keys:
            counts["teleports" if tag == "teleports" else key] = int(node.attrib[key]) if node is not None else -1
    return counts


def without_jump(table: np.ndarray, jump: float, first: int, steps: int) -> np.ndarray:
    """The rows (step, x, y, ...) without a step over `jump` metres that cover most of the scene; all of them as a rule.

    SUMO's people now and then appear at the far side of a crossing in one step; vehicles never do. [T, C] -> [S, C]
    """
    cuts = np.flatnonzero(np.linalg.norm(np.diff(table[:, 1:3], axis=0), axis=1) > jump) + 1
    parts = np.split(table, cuts)
    return max(parts, key=lambda p: int(np.sum((p[:, 0] >= first) & (p[:, 0] < first + steps))))


def _track(
    name: str, vtype: str, table: np.ndarray, sizes: dict[str, tuple[float, float]], span: tuple[int, int]
) -> Track | None:
    """The part of one agent's rows that lies in the scene (first step, steps), as box centres; None when none does."""
    first, steps = span
    step = table[:, 0].astype(int) - first
    if np.any(np.diff(step) != 1):
        raise SumoError(f"{name}: rows of the floating-car file skip a step; expected one row a step")
    inside = (step >= 0) & (step < steps)
    if not inside.any():
        return None
    length, width = sizes[vtype]
    kind = vtype.split("_")[0]
    walks = kind == "pedestrian"
    angle = math.radians(90.0 - table[0, 3])
    front = smooth(table[:, 1:3], (WALK_SMOOTH_S if walks else SMOOTH_S) / DT)
    if walks:
        xyh = trail(front, angle, 0.4, 0.0)[inside]
    else:
        axle = follow(front, angle, OVERHANG * length)
        xyh = trail(axle, angle, WHEELBASE * length, (0.5 - OVERHANG) * length)[inside]
    return Track(
        id=f"{kind}_{name[1:]}", type="pedestrian" if walks else CLASSES[kind][0], start=int(step[inside][0]),
        xyh=xyh, valid=np.ones(len(xyh), bool), size=(length, width),
    )  # fmt: skip


def smooth(xy: np.ndarray, sigma: float) -> np.ndarray:
    """Gaussian mean over time; beyond its ends the path is continued by point reflection. [T, 2] -> [T, 2]"""
    reach = min(math.ceil(3 * sigma), len(xy) - 1)
    if reach < 1:
        return xy.copy()
    weight = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    weight /= weight.sum()
    padded = np.concatenate([2 * xy[0] - xy[reach:0:-1], xy, 2 * xy[-1] - xy[-2 : -reach - 2 : -1]])
    return np.stack([np.convolve(padded[:, i], weight, mode="valid") for i in range(xy.shape[1])], axis=1)


def follow(front: np.ndarray, angle: float, behind: float) -> np.ndarray:
    """Where a point is that follows the path of `front` so many metres behind. [T, 2] -> [T, 2]

    Before its first point the path is taken as straight along `angle`.
    """
    back = front[0] - (behind + 1.0) * np.array([math.cos(angle), math.sin(angle)])
    path = np.concatenate([back[None], front])
    s = np.r_[0.0, np.cumsum(np.linalg.norm(np.diff(path, axis=0), axis=1))]
    here = s[1:] - behind
    return np.stack([np.interp(here, s, path[:, i]) for i in (0, 1)], axis=1)


def trail(front: np.ndarray, angle: float, axle: float, centre: float) -> np.ndarray:
    """Boxes of a body that `front` draws, while a point `axle` metres behind it never moves sideways.

    front: metres [T, 2]; angle: the first heading, radians from +x; centre: of the box, metres behind `front`.
    Returns the centre's x, y and the heading in (-pi, pi]. [T, 3]
    """
    out = np.empty((len(front), 3))
    rx, ry = front[0, 0] - axle * math.cos(angle), front[0, 1] - axle * math.sin(angle)
    for t, (x, y) in enumerate(front.tolist()):
        dx, dy = x - rx, y - ry
        d = math.hypot(dx, dy)
        ux, uy = (dx / d, dy / d) if d > 1e-9 else (math.cos(angle), math.sin(angle))
        rx, ry = x - axle * ux, y - axle * uy
        out[t] = x - centre * ux, y - centre * uy, math.atan2(uy, ux)
    return out
