"""Scenes cut from one recording overlap in time: find them by what they share, and never split what overlaps."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from seqdiff.domains.trajectory.scene import Scene, SceneError

WINDOW = 10  # steps of a piece of motion
VARIED = 8  # different displacements that it must hold: standing and even motion prove nothing
SAME_METRES = 2e-3  # two pieces are one when the shift between them stays constant to this
MIN_POSITIONS = 20  # identical positions (to a centimetre) that make two scenes overlap
MIN_PIECES = 10  # identical pieces of motion that do
SPLITS = ("train", "val", "test")


def overlap_groups(scenes: Sequence[Scene]) -> list[int]:
    """Group number of each scene: scenes that share recorded moments, directly or through others, have the same one.

    Two scenes overlap if they hold MIN_POSITIONS identical positions, or MIN_PIECES identical pieces of motion: the
    same displacements over WINDOW steps wherever they lie, since scenes cut from one recording may each have an origin
    of their own.
    """
    parent = list(range(len(scenes)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for table, least in ((shared_positions(scenes), MIN_POSITIONS), (shared_motion(scenes), MIN_PIECES)):
        for (i, j), count in table.items():
            if count >= least:
                parent[max(root(i), root(j))] = min(root(i), root(j))
    roots = [root(i) for i in range(len(scenes))]
    number = {r: n for n, r in enumerate(dict.fromkeys(roots))}
    return [number[r] for r in roots]


def shared_positions(scenes: Sequence[Scene]) -> Counter[tuple[int, int]]:
    """How many positions (rounded to 1 cm) each pair of scenes has in common."""
    holders: dict[tuple[float, float], set[int]] = defaultdict(set)
    for n, scene in enumerate(scenes):
        for track in scene.tracks:
            for x, y in np.round(track.xyh[track.valid, :2], 2).tolist():
                holders[x, y].add(n)
    return _pairs(holders.values())


def _pairs(sets: Iterable[set[int]]) -> Counter[tuple[int, int]]:
    count: Counter[tuple[int, int]] = Counter()
    for members in sets:
        if len(members) > 1:
            order = sorted(members)
            count.update((a, b) for k, a in enumerate(order) for b in order[k + 1 :])
    return count


def shared_motion(scenes: Sequence[Scene]) -> Counter[tuple[int, int]]:
    """How many pieces of motion each pair of scenes has in common, wherever they lie."""
    found: dict[bytes, list[tuple[int, np.ndarray]]] = defaultdict(list)
    for n, scene in enumerate(scenes):
        for track in scene.tracks:
            for piece, key in _pieces(track.xyh[:, :2], track.valid):
                found[key].append((n, piece))
    count: Counter[tuple[int, int]] = Counter()
    for pieces in found.values():
        pairs = set()
        for k, (i, a) in enumerate(pieces):
            for j, b in pieces[k + 1 :]:
                pair = (min(i, j), max(i, j))
                if i != j and pair not in pairs and np.ptp(a - b, axis=0).max() < SAME_METRES:
                    pairs.add(pair)
        count.update(pairs)
    return count


def _pieces(xy: np.ndarray, valid: np.ndarray) -> Iterable[tuple[np.ndarray, bytes]]:
    if len(xy) <= WINDOW:
        return
    cells = np.round(np.diff(xy, axis=0) * 100)
    whole = np.lib.stride_tricks.sliding_window_view(valid, WINDOW + 1).all(1)
    for at in np.flatnonzero(whole):
        cell = cells[at : at + WINDOW] + 0.0  # no negative zeros: they would be other bytes
        if len({tuple(c) for c in cell.tolist()}) >= VARIED:
            yield xy[at : at + WINDOW + 1], cell.tobytes()


def split_groups(
    groups: Sequence[int], strata: Sequence[str], weight: Sequence[float], fractions: Sequence[float], seed: int
) -> list[str]:
    """Split of each scene: whole groups, dealt within each stratum (e.g. the road) to the split that lacks most weight.

    groups, strata, weight [N scenes]: a group spanning strata counts for its first one. fractions: train, val, test,
    summing to 1. Groups heavier than the smallest share are dealt first, heaviest first; the others in the order of a
    hash of seed and group. Same input and seed, same split.
    """
    if len(fractions) != 3 or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6:
        raise SceneError(
            f"fractions={tuple(fractions)}: expected three shares (train, val, test) that sum to 1, e.g. 0.7, 0.1, 0.2"
        )
    share = {s: f for s, f in zip(SPLITS, fractions) if f > 0}
    mass: dict[int, float] = defaultdict(float)
    home: dict[int, str] = {}
    for group, stratum, w in zip(groups, strata, weight):
        mass[group] += w
        home.setdefault(group, stratum)
    split_of: dict[int, str] = {}
    for stratum in sorted(set(home.values())):
        mine = [g for g in mass if home[g] == stratum]
        total = sum(mass[g] for g in mine)
        lack = {s: f * total for s, f in share.items()}
        heavy = min(share.values()) * total
        dealt = {g: hashlib.sha256(f"{seed}:{stratum}:{g}".encode()).hexdigest() for g in mine}
        for group in sorted(mine, key=lambda g: (-mass[g] if mass[g] > heavy else 0.0, dealt[g])):
            split_of[group] = max(share, key=lambda s: lack[s])
            lack[split_of[group]] -= mass[group]
    return [split_of[g] for g in groups]
