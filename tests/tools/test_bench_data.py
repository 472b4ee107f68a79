"""The data benchmark runs, and an index of a million windows stays small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from seqdiff.domains.trajectory.windows import Vary, WindowDataset, WindowSpec
from seqdiff.tools.bench_data import main, measure, own_memory, synthetic_store


def test_bench_prints_speed_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--synthetic", "100", "--repeats", "1", "--batch-size", "4", "--stride-s", "2", "--seconds", "0.1"])
    text = capsys.readouterr().out
    assert "996 windows of train (every 2 s)" in text  # t0 at 20, 40, ... 19920 of one scene
    assert "batches of 4: 21 + 60 frames" in text and "windows/s wall" in text and "MiB" in text
    with pytest.raises(SystemExit):
        main([])


@pytest.mark.slow
def test_millions_of_windows_are_not_held_in_memory(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    spec = WindowSpec()
    store = synthetic_store(tmp_path / "s", 2_000_000, spec, 0.1)
    before = own_memory()
    data = WindowDataset(store, spec, "train", Vary(stride_s=0.1))
    assert len(data) >= 2_000_000
    speed = measure(data, 64, repeats=3)
    assert own_memory() - before < 250  # MiB; the store is 395 MiB on disk
    assert max(speed.cpu) > 2_000  # several times that on a machine that is not shared
