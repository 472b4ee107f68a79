"""Lanes joined end to start: the ways an agent may take through a map, and how each of them turns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqdiff.domains.trajectory.scene import RoadMap

JOINT = 0.6  # metres between the end of a lane and the start of the next
BESIDE = 2.5  # metres from a lane's centre within which an agent is on it
FACING = 0.6  # radians between an agent's heading and its lane's
STEP = 0.5  # metres between the points of a route


@dataclass(frozen=True)
class Route:
    """A way ahead from where an agent stands."""

    points: np.ndarray  # n 2, STEP apart
    heading: np.ndarray  # n, radians, unwrapped
    lanes: tuple[str, ...]

    @property
    def turned(self) -> np.ndarray:
        """Heading relative to the start, radians, left is positive [n]."""
        return self.heading - self.heading[0]


class LaneGraph:
    """Lane centre lines of a map, in its frame; two lanes are joined where one ends and the other starts."""

    def __init__(self, road: RoadMap) -> None:
        lanes = [e for e in road.elements if e.kind == "lane_center" and len(e.points) > 1]
        self.ids, self.points = [e.id for e in lanes], [e.points for e in lanes]
        first = np.array([p[0] for p in self.points]).reshape(-1, 2)
        last = np.array([p[-1] for p in self.points]).reshape(-1, 2)
        apart = np.linalg.norm(last[:, None] - first[None], axis=-1) if len(lanes) else np.zeros((0, 0))
        self.after = [np.flatnonzero(row < JOINT).tolist() for row in apart]

    def routes(self, xy: np.ndarray, heading: float, length: float, most: int = 64) -> list[Route]:
        """Ways of at least `length` metres (or to the end of the map) from the lanes that an agent at xy [2] is on.

        At most `most` of them; none where it is on no lane.
        """
        out: list[Route] = []
        for lane in range(len(self.ids)):
            line, angle = _even(self.points[lane])
            gap = np.linalg.norm(line - xy, axis=1)
            at = int(gap.argmin())
            turn = angle[at] - heading
            if gap[at] > BESIDE or abs(np.arctan2(np.sin(turn), np.cos(turn))) > FACING:
                continue
            todo: list[tuple[tuple[int, ...], np.ndarray, float]] = [((lane,), self.points[lane], at * STEP)]
            while todo and len(out) < most:
                path, points, skip = todo.pop()
                long_enough = _length(points) - skip >= length
                more = [n for n in self.after[path[-1]] if n not in path]
                if long_enough or not more:
                    line, angle = _even(points)
                    start = min(round(skip / STEP), len(line) - 2)
                    out.append(Route(line[start:], angle[start:], tuple(self.ids[n] for n in path)))
                    continue
                todo += [((*path, n), np.concatenate([points, self.points[n]]), skip) for n in more]
        return out


def _length(points: np.ndarray) -> float:
    return float(np.linalg.norm(np.diff(points, axis=0), axis=1).sum())


def _even(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points STEP apart along a line, and its unwrapped direction at each."""
    part = np.linalg.norm(np.diff(points, axis=0), axis=1)
    keep = np.concatenate([[True], part > 1e-6])
    points, at = points[keep], np.concatenate([[0.0], part[part > 1e-6].cumsum()])
    s = np.arange(0.0, max(at[-1], 2 * STEP), STEP)
    line = np.stack([np.interp(s, at, points[:, i]) for i in range(2)], 1)
    if len(line) < 2 or at[-1] < STEP:
        d = points[-1] - points[0] if len(points) > 1 else np.array([1.0, 0.0])
        return points[0] + s[:, None] * d / max(float(np.linalg.norm(d)), 1e-9), np.full(len(s), np.arctan2(d[1], d[0]))
    d = np.gradient(line, axis=0)
    return line, np.unwrap(np.arctan2(d[:, 1], d[:, 0]))


def turning(route: Route, least: float, beyond: float) -> tuple[np.ndarray, float, float] | None:
    """Where a route has turned: the point `beyond` metres past the first place where it has turned left by `least` radians
    (right, if that is negative), the heading there and the way to it; None where it does not, or turns the other way first."""
    sign = np.sign(least)
    done = np.flatnonzero(sign * route.turned > abs(least))
    if not len(done) or (sign * route.turned[: done[0]] < -0.5 * abs(least)).any():
        return None
    at = min(int(done[0] + round(beyond / STEP)), len(route.points) - 1)
    return route.points[at], float(route.heading[at]), at * STEP
