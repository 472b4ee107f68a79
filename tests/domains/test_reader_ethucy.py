"""ETH/UCY text files: what is refused, folds, gaps, and the published counts on the real files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from seqdiff.domains.trajectory.readers import ethucy
from seqdiff.domains.trajectory.readers.ethucy import EthUcyReader, fold_parts, read_rows
from seqdiff.domains.trajectory.scene import Scene, SceneError

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "trajectory" / "eth_ucy"
real = pytest.mark.skipif(not DATA.is_dir(), reason=f"the ETH/UCY files are not at {DATA}")


def write(path: Path, rows: list[tuple[float, ...]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(str(float(v)) for v in row) + "\n" for row in rows))
    return path


def walk(frames: list[int], agent: int = 1, speed: float = 0.5) -> list[tuple[float, ...]]:
    return [(f, agent, speed * n, 1.0) for n, f in enumerate(frames)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (walk([0, 6, 12, 18]), r"6 frames x 3 apart, expected 10 frames = 0.4 s; resample"),
        (walk([0, 10, 20, 26, 32]), r"6 frames x 2, 10 frames x 2 apart \(mixed\)"),
        (walk([0, 10, 20]) + walk([3, 13], agent=2), r"10 frames x 3"),
        (walk([0, 20, 40]), r"20 frames x 2"),
        (walk([0, 10, 10]), r"pedestrian 1 stands twice in frame 10"),
        (walk([0, 10, 0, 10]), r"time goes back to frame 0 for pedestrian 1"),
        ([(0, 1, 2.0, 3.0), (10, 1, np.nan, 3.0)], r"row 2: .*NaN or infinity"),
        ([(0.5, 1, 2.0, 3.0)], r"frame and id must be whole numbers"),
        ([(0, 1, 2.0, 3.0), (10, 1, 2.0)], r"line 2: got 3 columns .*expected 4.*cut off"),
        ([], r"no rows"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, rows: list[tuple[float, ...]], message: str) -> None:
    with pytest.raises(SceneError, match=message):
        read_rows(write(tmp_path / "biwi_eth.txt", rows))


@pytest.mark.parametrize(
    ("text", "message"), [("0 1 2 oops\n", "line 1.*oops"), ("0\t1\t2.5\t3.5\n10\t1\t2.", "line 2")]
)
def test_text_that_is_cut_or_no_number(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "f.txt").write_text(text)
    with pytest.raises(SceneError, match=message):
        read_rows(tmp_path / "f.txt")


def test_binary_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "f.txt").write_bytes(b"\xff\xfe\x00\x80")
    for name in ("f.txt", "none.txt"):
        with pytest.raises(SceneError, match="cannot be read as text"):
            read_rows(tmp_path / name)


def test_folds_leave_exactly_their_scene_out() -> None:
    for fold, files in ethucy.FOLDS.items():
        parts = fold_parts(fold)
        assert [p for p in parts if p[2] == "test"] == [(f, f, "test") for f in files]
        for split in ("train", "val"):
            assert [f for _, f, s in parts if s == split] == [f for f in ethucy.FILES if f not in files]


def test_an_unknown_fold_suggests_the_right_one() -> None:
    with pytest.raises(SceneError, match=r"no fold 'zara_1', expected one of eth, hotel, .*did you mean zara1\?"):
        fold_parts("zara_1")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A little ETH/UCY folder: in every file pedestrian 1 walks with a gap, 2 has one row in the val part."""
    for name in ethucy.FILES:
        early, late = walk([780 + 10 * k for k in (0, 1, 2, 5, 6, 7)]), walk([860, 870]) + [(870, 2, 4.0, 4.0)]
        write(tmp_path / "all_data" / f"{name}.txt", early + late)
        write(tmp_path / "train" / f"{name}_train.txt", early)
        write(tmp_path / "val" / f"{name}_val.txt", late)
    return tmp_path


def test_gaps_are_holes_and_the_true_rate_is_stated(small: Path) -> None:
    scenes = {s.id: s for s in EthUcyReader("hotel", small) if isinstance(s, Scene)}
    assert len(scenes) == 15
    scene = scenes["biwi_eth_train"]
    assert (scene.split, scene.dt, scene.meta["true_dt"]) == ("train", 0.4, 0.667)
    assert "true_dt" not in scenes["crowds_zara01_val"].meta
    (track,) = scene.tracks
    assert track.valid.tolist() == [True] * 3 + [False] * 2 + [True] * 3
    assert np.isnan(track.xyh[3:5]).all()
    assert track.xyh[5].tolist() == [1.5, 1.0, 0.0]
    assert [(t.id, t.start) for t in scenes["crowds_zara01_val"].tracks] == [("1", 0), ("2", 1)]


def test_a_missing_file_is_named(small: Path) -> None:
    (small / "all_data" / "students001.txt").unlink()
    with pytest.raises(SceneError, match=r"lacks students001\.txt"):
        EthUcyReader("eth", small)
    with pytest.raises(SceneError, match="is not a folder"):
        EthUcyReader("eth", small / "nowhere")


@real
@pytest.mark.parametrize(
    ("fold", "all_agents", "with_company"),
    [("eth", 364, 181), ("hotel", 1197, 1053), ("univ", 24334, 24334), ("zara1", 2356, 2253), ("zara2", 5910, 5833)],
)
def test_the_published_number_of_agents_in_the_test_windows(fold: str, all_agents: int, with_company: int) -> None:
    """Agents present in all 20 rows, stride 1, a window running over the annotated frames of a file in their order."""
    alone = company = 0
    for scene in EthUcyReader(fold, DATA):
        assert isinstance(scene, Scene)
        if scene.split != "test":
            continue
        spans = np.array([(t.start, t.start + len(t.valid)) for t in scene.tracks])
        assert all(t.valid.all() for t in scene.tracks)
        for t0 in range(spans[:, 1].max() - 19):
            n = int(((spans[:, 0] <= t0) & (spans[:, 1] >= t0 + 20)).sum())
            alone += n
            company += n if n > 1 else 0
    assert (alone, company) == (all_agents, with_company)


@real
def test_train_and_val_parts_make_up_the_whole_file() -> None:
    for file in ethucy.FILES:
        whole = read_rows(DATA / "all_data" / f"{file}.txt")
        parts = [read_rows(DATA / s / f"{file}_{s}.txt") for s in ("train", "val")]
        assert np.array_equal(np.concatenate([p.frame for p in parts]), whole.frame)
        assert np.array_equal(np.concatenate([p.xy for p in parts]), whole.xy)
        assert parts[0].frame.max() < parts[1].frame.min()
