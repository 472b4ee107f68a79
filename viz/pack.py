"""Coordinates as small text: rounded to 1 cm and 1 mrad, second differences along time, byte planes, deflate, base64.

The page's script undoes it exactly (`page/decode.js`): nothing is lost beyond the rounding.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field

import numpy as np

CM = 100.0  # units a metre
MRAD = 1000.0  # units a radian
INVALID = -(2**31)  # no coordinate: 21,475 km away from the origin in centimetres


@dataclass
class Blob:
    """Named integer arrays joined into one text. `index` goes to the page as JSON, `text()` as base64."""

    index: dict[str, dict] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    size: int = 0

    def add(self, name: str, values: np.ndarray, unit: float) -> None:
        """Append float `values` [..., n] in steps of 1/unit; NaN becomes invalid; differences run along the last."""
        data, raw = _differences(values, unit)
        self.index[name] = {"shape": list(values.shape), "at": self.size, "unit": unit, "order": data}
        self.parts.append(raw)
        self.size += len(raw)

    def text(self) -> str:
        return base64.b64encode(zlib.compress(b"".join(self.parts), 6)).decode("ascii")


def _differences(values: np.ndarray, unit: float) -> tuple[int, bytes]:
    finite = np.isfinite(values)
    scaled = np.where(finite, values, 0.0) * unit
    if np.abs(scaled).max(initial=0.0) > 2**30:
        far = np.abs(scaled).max() / unit
        raise ValueError(
            f"a coordinate {far:.3g} from the scene's origin, expected at most {2**30 / unit:.3g}: wrong units?"
        )
    whole = np.where(finite, np.rint(scaled), INVALID).astype(np.int64)
    order = (
        2 if finite.all() else 0
    )  # holes: plain values (few and repetitive), since a difference across a hole means nothing
    if order == 2:
        whole = np.diff(np.diff(whole, axis=-1, prepend=0), axis=-1, prepend=0)
    planes = whole.astype(np.int32).reshape(-1, 1).view(np.uint8).reshape(-1, 4).T  # like bytes together deflate better
    return order, np.ascontiguousarray(planes).tobytes()
