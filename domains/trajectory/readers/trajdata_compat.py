"""Getting trajdata 1.4.0 to run beside current numpy, pandas and protobuf, and plain words where it can't.

trajdata 1.4.0 names `numpy.string_`, which numpy 2 removed; it is put back only while trajdata runs. Its pin
protobuf==3.19.4 is only a pin (generated code loads under 3.20 to 7), so it is installed with `pip install --no-deps`
beside the packages that it really imports (docs/readers.md).
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from seqdiff.domains.trajectory.scene import SceneError

INSTALL = "pip install '.[trajdata]' && pip install --no-deps trajdata==1.4.0"


@dataclass(frozen=True)
class Known:
    """One data set that trajdata reads: where its files lie, and the package that trajdata itself needs for it."""

    has_map: bool
    files: str
    package: str = ""


DATASETS = {
    **{
        f"eupeds_{f}": Known(False, "all_data/ with the eight ETH/UCY files")
        for f in ("eth", "hotel", "univ", "zara1", "zara2")
    },
    "sdd": Known(False, "the Stanford Drone Dataset's annotations/"),
    **{
        f"nusc_{s}": Known(True, "nuScenes' samples, maps and v1.0-* folders", "nuscenes-devkit==1.1.9")
        for s in ("trainval", "test", "mini")
    },
    **{
        f"nuplan_{s}": Known(True, "nuPlan's dataset/nuplan-v1.1", "nuplan-devkit")
        for s in ("mini", "train", "val", "test")
    },
    **{
        f"lyft_{s}": Known(True, "Lyft's scenes/*.zarr of that part", "l5kit==1.5.0")
        for s in ("sample", "train", "train_full", "val")
    },
    **{
        f"waymo_{s}": Known(
            True, "Waymo Open Motion's tfrecord folders", "waymo-open-dataset-tf-2-11-0 (with tensorflow 2.11)"
        )
        for s in ("train", "val", "test")
    },
    **{
        f"interaction_{s}": Known(True, "INTERACTION's train, val and maps folders", "lanelet2")
        for s in ("single", "multi")
    },
}


def known(dataset: str) -> Known:
    """The entry of a data set's name; SceneError with the nearest spelling otherwise."""
    if dataset in DATASETS:
        return DATASETS[dataset]
    near = difflib.get_close_matches(dataset, DATASETS, 1, cutoff=0.4)
    hint = f"; did you mean trajdata:{near[0]}?" if near else ""
    raise SceneError(f"trajdata 1.4.0 has no data set {dataset!r}{hint} It has {', '.join(DATASETS)}")


@contextmanager
def running(dataset: str) -> Iterator[ModuleType]:
    """Inside, `trajdata` is imported and usable. SceneError naming the package to install where one is missing."""
    lent = "string_" not in np.__dict__
    if lent:
        np.string_ = np.bytes_  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside trajdata and the packages that it imports
            try:
                import trajdata
            except ImportError as error:
                raise SceneError(
                    f"reading {dataset} needs trajdata 1.4.0, which can't be imported ({error}): {INSTALL}"
                ) from error
            try:
                yield trajdata
            except ImportError as error:
                need = known(dataset).package or "its own packages"
                raise SceneError(
                    f"trajdata needs {need} to read {dataset} ({error}); pip install it into this environment"
                ) from error
    finally:
        if lent:
            del np.string_  # type: ignore[attr-defined]
