"""One recorded scene: tracks, road map, signals. What every reader yields and the packed store takes.

Units: metres, radians (counter-clockwise from the x axis), seconds. Positions are the centre of the agent's box in a world
frame that is Cartesian (a city frame, UTM or a local one), float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

AGENT_TYPES = ("vehicle", "pedestrian", "bicycle", "motorcycle", "truck", "bus", "other")
MAP_KINDS = ("lane_center", "lane_boundary", "road_edge", "crosswalk", "drivable_area", "drivable_hole")
SIGNAL_STATES = ("none", "green", "yellow", "red", "unknown")
MAX_SPEED = 100.0  # m/s; above it the positions are in another unit or the track jumps


class SceneError(ValueError):
    """A scene or a source file that cannot be read as it stands. The text says what was got, what was expected, what to do."""


@dataclass
class Track:
    """One agent's recorded states on the scene's own clock (step 0 = first step of the scene)."""

    id: str
    type: str  # one of AGENT_TYPES
    start: int  # scene step of the first row
    xyh: np.ndarray  # float64 [T, 3]: x, y, heading; rows that are not valid hold NaN
    valid: np.ndarray  # bool [T]: False = a hole in the recording
    size: tuple[float, float] | None = None  # length, width; None = not recorded
    scored: bool = False  # the data set itself asks for this agent's forecast (Argoverse 2 FOCAL and SCORED)
    focal: bool = False


@dataclass
class MapElement:
    """A polyline, or the ring of a polygon (crosswalk, drivable_area, drivable_hole), closed without repeating its first point."""

    id: str
    kind: str  # one of MAP_KINDS
    points: np.ndarray  # float64 [P, 2]


@dataclass
class RoadMap:
    """Map of one place. A scene without a map has None: unknown, not empty."""

    id: str
    elements: list[MapElement]


@dataclass
class Scene:
    id: str
    dt: float  # seconds a step
    split: str  # "train", "val", "test" or the data set's own name
    tracks: list[Track]
    map: RoadMap | None = None
    # changes of signal state: (lane_center element id, step from which it holds, one of SIGNAL_STATES)
    signals: list[tuple[str, int, str]] = field(default_factory=list)
    meta: dict[str, str | int | float | bool] = field(
        default_factory=dict
    )  # e.g. group of overlapping scenes, nominal dt


@dataclass(frozen=True)
class Drop:
    """One thing left out of the store, and why."""

    scene_id: str
    reason: str  # short and countable, e.g. "scene shorter than a window"
    detail: str = ""  # which agent, which row, what was got


@runtime_checkable
class Reader(Protocol):
    """A source of scenes. `name` and `source` go to the manifest; iterating yields scenes and, in between, what was dropped."""

    name: str
    source: str

    def __iter__(self) -> Iterator[Scene | Drop]: ...

    def __len__(self) -> int:
        """Number of source scenes, for the progress bar."""
        ...
