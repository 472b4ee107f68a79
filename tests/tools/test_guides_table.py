"""The table of guides on a closed form: what holds, and which guide comes nearest to the law that was asked for."""

from __future__ import annotations

import torch

from seqdiff.tools.guides import LAW, main, rows, weighted_distance


def test_constraints_hold_and_the_way_through_the_net_is_nearer_to_the_law():
    found = {name: (held, far) for name, held, far in rows(8, k=300, draws=400)}
    for name in (
        "energy descent, t <= 1",
        "projection onto a box",
        "projection onto an equality",
        "infilling by replacement",
    ):
        assert found[name][0] > 0.999
    through = found["equality through the net, projected at the end"]
    assert through[0] > 0.999 and through[1] < 0.3 * found["projection onto an equality"][1]
    assert found["the same through the net, steps <= 2"][1] < 0.6 * found["energy descent, t <= 1"][1]
    assert found["classifier-free, weight 1, rescale 0"][1] < 0.1  # the conditional law itself


def test_the_weighted_distance_knows_equal_laws_and_uses_the_weights():
    generator = torch.Generator().manual_seed(0)
    x, y = LAW.sample((600,), generator), LAW.sample((600,), generator)
    even = torch.full((600,), 1 / 600).double()
    assert abs(weighted_distance(x, y, even)) < 0.02
    both = torch.cat([x, y + 9])
    ignored = torch.cat([even, torch.zeros(600).double()])
    assert abs(weighted_distance(both, y, ignored) - weighted_distance(x, y, even)) < 1e-9


def test_the_command_prints_a_row_for_each_guide(capsys):
    assert main(["--steps", "4", "--k", "60"]) == 0
    said = capsys.readouterr().out
    assert "4 steps: held %" in said and "resampling, threshold .5" in said
