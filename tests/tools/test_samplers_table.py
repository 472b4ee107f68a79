from __future__ import annotations

import pytest

from seqdiff.path import Path
from seqdiff.steps import STEPS
from seqdiff.tools.samplers import law_error, main, ode_error


def test_the_table_has_a_row_for_every_sampler_and_path(capsys):
    assert main(["--steps", "1", "--no-orders"]) == 0
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in line[1:-1]] for line in lines]
    want = {(name, kind) for name, claim in STEPS.items() if not claim.student for kind in ("linear", "cosine", "edm")}
    assert {(row[0], row[1]) for row in cells} == want
    heun = next(row for row in cells if row[:2] == ["heun", "linear"])
    assert heun[3:6] == ["2", "-", "1"]  # its last step has one evaluation
    # one step of anything on the linear path ends at E[x0] = .26
    assert len({row[6] for row in cells if row[1] == "linear" and row[0] in ("ddim", "euler", "heun", "ab2")}) == 1


def test_errors_fall():
    assert ode_error("ddim", Path(), 16, "uniform") < ode_error("ddim", Path(), 4, "uniform")
    assert law_error("ancestral", Path(), 16, "uniform") < law_error("ancestral", Path(), 2, "uniform")


def test_no_steps_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--steps", "0"])
    assert "at least 1" in capsys.readouterr().err
