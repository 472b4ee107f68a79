"""ETH/UCY pedestrian files (frame, id, x, y in metres, separated by TAB): checks, leave-one-out folds, and a reader.

Fold F trains on the first part of every scene but F's, validates on the rest of the same scenes and tests on F's whole
files (univ: students001 and students003). uni_examples and crowds_zara03 are never a test.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from seqdiff.domains.trajectory.readers.vet import dense, motion_heading
from seqdiff.domains.trajectory.scene import Drop, Scene, SceneError, Track

ROW_STEP = 10  # video frames between two annotated rows
DT = 0.4  # s a row, as every published table calls it
TRUE_DT = {"biwi_eth": 0.667}  # the ETH video runs at another rate; tables keep calling it 0.4 s
FILES = (
    "biwi_eth",
    "biwi_hotel",
    "crowds_zara01",
    "crowds_zara02",
    "crowds_zara03",
    "students001",
    "students003",
    "uni_examples",
)
FOLDS = {
    "eth": ("biwi_eth",),
    "hotel": ("biwi_hotel",),
    "univ": ("students001", "students003"),
    "zara1": ("crowds_zara01",),
    "zara2": ("crowds_zara02",),
}


@dataclass
class Rows:
    """One file's rows, in file order: frame int64 [N], agent int64 [N], xy float64 [N, 2] metres."""

    frame: np.ndarray
    agent: np.ndarray
    xy: np.ndarray


def read_rows(path: Path) -> Rows:
    """Read and check one file.

    SceneError where it is cut off, holds no numbers, repeats a row, goes back in time, or where its rows aren't
    ROW_STEP frames apart.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SceneError(f"{path}: cannot be read as text ({error})") from error
    values = []
    for n, line in enumerate(lines, 1):
        if not line.strip():
            continue
        cells = line.split()
        if len(cells) != 4:
            raise SceneError(
                f"{path}, line {n}: got {len(cells)} columns ({line[:60]!r}), "
                "expected 4: frame, id, x, y; is the file cut off?"
            )
        try:
            values.append([float(c) for c in cells])
        except ValueError as error:
            raise SceneError(f"{path}, line {n}: {error}; expected numbers frame, id, x, y") from error
    if not values:
        raise SceneError(f"{path}: no rows; expected lines of frame, id, x, y")
    table = np.asarray(values)
    bad = np.flatnonzero(~np.isfinite(table).all(1))
    if len(bad):
        raise SceneError(f"{path}, row {bad[0] + 1}: {table[bad[0]].tolist()} holds NaN or infinity; take the row out")
    if (table[:, :2] != np.round(table[:, :2])).any():
        raise SceneError(f"{path}: frame and id must be whole numbers; are the columns frame, id, x, y?")
    rows = Rows(table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2:])
    _check_time(path, rows)
    return rows


def _check_time(path: Path, rows: Rows) -> None:
    order = np.argsort(rows.agent, kind="stable")
    agent, frame = rows.agent[order], rows.frame[order]
    same = agent[1:] == agent[:-1]
    step = np.diff(frame)[same]
    if not len(step):
        return
    at = order[1:][same]
    if (step == 0).any():
        row = at[step == 0][0]
        raise SceneError(f"{path}: pedestrian {rows.agent[row]} stands twice in frame {rows.frame[row]}")
    if (step < 0).any():
        row = at[step < 0][0]
        raise SceneError(
            f"{path}: time goes back to frame {rows.frame[row]} for pedestrian {rows.agent[row]}; "
            "expected frames in order (two recordings in one file, or one id used twice?)"
        )
    kinds, counts = np.unique(step, return_counts=True)
    usual = int(kinds[counts.argmax()])
    if usual != ROW_STEP or (kinds % ROW_STEP != 0).any() or len(np.unique(rows.frame % ROW_STEP)) > 1:
        seen = ", ".join(f"{k} frames x {c}" for k, c in zip(kinds[:6], counts[:6]))
        mixed = len(kinds) > 1 and (kinds % usual != 0).any()
        raise SceneError(
            f"{path}: rows of one pedestrian are {seen} apart{' (mixed)' if mixed else ''}, "
            f"expected {ROW_STEP} frames = {DT} s; "
            f"resample the file to one row every {ROW_STEP} frames, or renumber its frames if a row is {DT} s"
        )


def find_all_data(data_dir: Path) -> Path:
    """The folder that holds the eight whole files: data_dir itself or its all_data/."""
    for folder in (data_dir / "all_data", data_dir):
        if all((folder / f"{name}.txt").is_file() for name in FILES):
            return folder
    missing = [
        n for n in FILES if not (data_dir / f"{n}.txt").is_file() and not (data_dir / "all_data" / f"{n}.txt").is_file()
    ]
    state = f"lacks {', '.join(m + '.txt' for m in missing)}" if data_dir.is_dir() else "is not a folder"
    raise SceneError(
        f"data_dir={data_dir} {state}; expected the ETH/UCY files {', '.join(FILES)} (.txt) there or in its all_data/"
    )


def fold_parts(fold: str) -> list[tuple[str, str, str]]:
    """(scene id, file, split) of a fold, in the order train, val, test. SceneError for an unknown fold."""
    if fold not in FOLDS:
        near = difflib.get_close_matches(fold, FOLDS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise SceneError(f"ETH/UCY has no fold {fold!r}, expected one of {', '.join(FOLDS)}{hint}")
    rest = [n for n in FILES if n not in FOLDS[fold]]
    return (
        [(f"{n}_train", n, "train") for n in rest]
        + [(f"{n}_val", n, "val") for n in rest]
        + [(n, n, "test") for n in FOLDS[fold]]
    )


def scene_meta(file: str) -> dict[str, str | int | float | bool]:
    """What the store keeps about a file: its row step and, where it is another, the true time between rows."""
    meta: dict[str, str | int | float | bool] = {"row_step_frames": ROW_STEP, "nominal_dt": DT, "recording": file}
    if file in TRUE_DT:
        meta["true_dt"] = TRUE_DT[file]
    return meta


class EthUcyReader:
    """A fold straight from the text files, without trajdata. Gaps in a track are holes, not interpolated.

    data_dir holds train/ and val/ (the benchmark's parts) and all_data/ (whole files)."""

    def __init__(self, fold: str, data_dir: Path) -> None:
        self.parts = fold_parts(fold)
        self.name, self.source, self.root = f"eth_ucy_{fold}", f"ethucy:{fold}", Path(data_dir)
        self.whole = find_all_data(self.root)

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Scene | Drop]:
        for scene_id, file, split in self.parts:
            folder = self.whole if split == "test" else self.root / split
            rows = read_rows(folder / f"{scene_id}.txt")
            step = (rows.frame - rows.frame.min()) // ROW_STEP
            tracks = []
            for agent in np.unique(rows.agent):
                mine = rows.agent == agent
                start, xyh, valid = dense(step[mine], np.column_stack([rows.xy[mine], np.zeros(mine.sum())]))
                xyh[:, 2] = motion_heading(xyh[:, :2], valid, DT)
                tracks.append(Track(str(agent), "pedestrian", start, xyh, valid))
            yield Scene(scene_id, DT, split, tracks, meta=scene_meta(file))
