"""What a user wishes of futures: read from a yaml file, turned into energies for guidance, checked afterwards.

    - {kind: goal, scene_id: S, t0: 20, agent: "17", x: 12.0, y: 40.0, at_s: 6.0}     # world frame, as in samples.parquet
    - {kind: speed_limit, mps: 8.3}                                                   # all motor vehicles of all scenes
    - {kind: yields, scene_id: S, agent: a, to: b}

A wish that names an agent or a place names its scene; without t0 it holds in every window of it. Whether a wish is met is
decided by `satisfied`, on boxes and derivatives, never by the energy. Letters: b scenes, k samples, a agents, t steps.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.domains.trajectory.wishes import KINDS, ConstraintError, Term, Wish, one_scene


class Constraints:
    """The wishes of one file.

    Args:
        wishes: in the order of the file.
        source: where they come from, for messages and run.json.
    """

    def __init__(self, wishes: Sequence[Wish], source: str = "") -> None:
        if not wishes:
            raise ConstraintError(f"{source or 'the wishes'}: no wish in it; leave constraints out to draw without")
        self.wishes, self.source = tuple(wishes), source

    @property
    def kinds(self) -> list[str]:
        """Kinds in the order of the file, each once."""
        return list(dict.fromkeys(w.kind for w in self.wishes))

    def agents(self, batch: SceneBatch) -> Tensor:
        """Agents that wishes are for -> bool [b, a]: the named ones; all of a scene with a wish for all."""
        out = torch.zeros_like(batch.mask)
        for i in range(batch.n_scenes):
            for wish in self.wishes:
                if wish.matches(batch, i):
                    out[i] |= wish.concerns(batch, i)
        return out & batch.mask

    def energy(self, batch: SceneBatch) -> Callable[[Tensor], Tensor]:
        """Futures [b, k, a, t, 3] -> what the wishes find wrong with each agent, metres squared [b, k, a].

        Raises:
            ConstraintError: a wish that cannot be asked of its scene: an agent that is not there, no map or light where
                one is needed, a goal that nobody could reach.
        """
        terms = [self._bind(batch, i) for i in range(batch.n_scenes)]

        def of(futures: Tensor) -> Tensor:
            out = []
            for i, bound in enumerate(terms):
                total = futures.new_zeros(futures.shape[1:3])
                for wish, term in bound:
                    total = total + wish.weight * term.energy(futures[i])
                out.append(total)
            return torch.stack(out)

        return of

    def satisfied(self, futures: Tensor, batch: SceneBatch) -> dict[str, Tensor]:
        """Which samples meet all wishes of a kind -> {"satisfied_goal": float64 [b, k], ...}: 1 or 0, NaN = not asked there.

        futures: [b, k, a, t, 3] relative to batch.origin.
        """
        return Satisfaction(self).add(futures, batch)

    def measure(self) -> Satisfaction:
        """A fresh count of where the wishes are asked and met, to which batches are added."""
        return Satisfaction(self)

    def _bind(self, batch: SceneBatch, i: int) -> list[tuple[Wish, Term]]:
        asked = [w for w in self.wishes if w.matches(batch, i)]
        scene = one_scene(batch, i) if asked else batch
        bound = []
        for w in asked:
            try:
                term = w.bind(scene)
            except ConstraintError as error:
                number = self.wishes.index(w) + 1
                raise ConstraintError(f"{self.source} wish {number} ({w.kind}): {error}".strip()) from None
            if term is not None:
                bound.append((w, term))
        return bound


class Satisfaction:
    """Adds up, batch by batch, where each wish was asked and how often it was met."""

    def __init__(self, constraints: Constraints) -> None:
        self.constraints = constraints
        self._windows = [0] * len(constraints.wishes)
        self._unknown = [0] * len(constraints.wishes)
        self._met: list[float] = [0.0] * len(constraints.wishes)

    def add(self, futures: Tensor, batch: SceneBatch) -> dict[str, Tensor]:
        """Count the samples of a batch. Arguments and result as `Constraints.satisfied`."""
        c = self.constraints
        shape = futures.shape[:2]
        out = {
            f"satisfied_{kind}": torch.full(shape, math.nan, dtype=torch.float64, device=futures.device)
            for kind in c.kinds
        }
        for i in range(batch.n_scenes):
            bound = dict(c._bind(batch, i))
            for n, wish in enumerate(c.wishes):
                if not wish.matches(batch, i):
                    continue
                if wish not in bound:
                    self._unknown[n] += 1
                    continue
                met = bound[wish].satisfied(futures[i].detach()).double()
                self._windows[n] += 1
                self._met[n] += float(met.mean())
                row = out[f"satisfied_{wish.kind}"]
                row[i] = met if bool(row[i].isnan().all()) else torch.minimum(row[i], met)
        return out

    def report(self) -> dict[str, Any]:
        """For run.json: each wish, the windows it was asked in, the share of samples that met it.

        Raises:
            ConstraintError: no wish was asked in any window.
        """
        rows = [
            w.told() | {"n_windows": n, "unknown": unknown, "satisfied": met / n if n else None}
            for w, n, unknown, met in zip(self.constraints.wishes, self._windows, self._unknown, self._met, strict=True)
        ]
        if not any(self._windows):
            first = self.constraints.wishes[0]
            raise ConstraintError(
                f"{self.constraints.source}: no wish was asked in any window that was drawn; the first one is for scene "
                f"{first.scene_id!r} at t0 {first.t0}: check split, limit and windows, and that the ids are the store's"
            )
        return {"source": self.constraints.source, "wishes": rows}


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_constraints(path: Path | str) -> Constraints:
    """Wishes from a yaml file: a list with one mapping each, see the module's head and README.

    Raises:
        ConstraintError: (a ValueError) what is wrong with which wish, and what to write instead.
        FileNotFoundError: no such file.
    """
    file = Path(path)
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConstraintError(f"{file} is not yaml: {error}") from error
    return parse_constraints(found, str(file))


def parse_constraints(found: Any, source: str = "") -> Constraints:
    """Wishes from plain data, as a yaml file holds them."""
    if not isinstance(found, list):
        raise ConstraintError(
            f"{source or 'wishes'}: got {type(found).__name__}, expected a list of wishes, e.g. "
            "- {kind: speed_limit, mps: 8.3}"
        )
    wishes = []
    for n, item in enumerate(found):
        try:
            wishes.append(_wish(item))
        except ConstraintError as error:
            raise ConstraintError(f"{source} wish {n + 1}: {error}".strip()) from None
    return Constraints(wishes, source)


def _near(name: object, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(name), names, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _wish(item: Any) -> Wish:
    if not isinstance(item, dict) or "kind" not in item:
        raise ConstraintError(f"got {item!r}, expected a mapping with a kind: one of {', '.join(KINDS)}")
    kind = item["kind"]
    if kind not in KINDS:
        raise ConstraintError(f"unknown kind {kind!r}, expected one of {', '.join(KINDS)}{_near(kind, list(KINDS))}")
    made = KINDS[kind]
    known = {f.name: f for f in fields(made)}
    given = {key: value for key, value in item.items() if key != "kind"}
    for key in given:
        if key not in known:
            takes = ", ".join(known)
            raise ConstraintError(f"{kind} takes no {key!r}; it takes {takes}{_near(key, list(known))}")
    missing = [name for name, f in known.items() if f.default is MISSING and name not in given]
    if missing:
        raise ConstraintError(f"{kind} needs {', '.join(missing)}")
    return made(**{key: _value(kind, key, value, str(known[key].type)) for key, value in given.items()})


def _value(kind: str, key: str, value: Any, annotation: str) -> Any:
    """A value of the yaml as the field's type; agents' ids may be written as numbers."""
    if value is None and "None" in annotation:
        return None
    if annotation.startswith("str") and isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    if annotation.startswith("int") and isinstance(value, int) and not isinstance(value, bool):
        return value
    if annotation.startswith("float") and _is_number(value):
        return float(value)
    pair = isinstance(value, list) and len(value) == 2 and all(isinstance(p, list) and len(p) == 2 for p in value)
    if annotation.startswith("tuple") and pair and all(_is_number(v) for p in value for v in p):
        return tuple(tuple(float(v) for v in p) for p in value)
    want = {"s": "a name", "i": "a whole number", "f": "a finite number", "t": "two points, [[x, y], [x, y]]"}
    raise ConstraintError(f"{key} of {kind} is {value!r}, expected {want[annotation[0]]}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
