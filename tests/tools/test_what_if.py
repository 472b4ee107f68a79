"""The example on the traffic that ships with the package: its wish leads to the left; arguments that do not go together."""

from __future__ import annotations

import math

import pytest

from seqdiff.domains.trajectory.constraints import parse_constraints
from seqdiff.domains.trajectory.data import TrajectoryData
from seqdiff.domains.trajectory.windows import WindowSpec
from seqdiff.tools.what_if import find_case, main


def test_a_left_turn_is_found_and_can_be_asked() -> None:
    data = TrajectoryData("embedded", WindowSpec(history_s=2.0, horizon_s=6.0, stride_s=2.0, radius_m=80.0))
    found = data.dataset("test")
    batch = found.batch([found.find("crossing_11_run0", 280)])
    case = find_case(data, batch, 1.0, "car_26")
    assert case is not None and 30 < case.way < 50
    j = batch.agent_id[0].index("car_26")
    x, y, heading = batch.hist[0, j, -1].double().tolist()
    east, north = case.x - float(batch.origin[0, 0]) - x, case.y - float(batch.origin[0, 1]) - y
    left = math.cos(heading) * north - math.sin(heading) * east
    assert 3 < left < case.way and 1.0 < case.heading - heading < 2.2
    assert parse_constraints(case.wishes()).energy(batch)(batch.fut[:, None])[0, 0, j] > 0  # it went straight on
    assert find_case(data, batch, 1.0, "nobody") is None


@pytest.mark.parametrize("more, told", [(["--scene", "s"], "go together"), (["--agent", "a"], "needs --scene")])
def test_arguments(more, told, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--ckpt", "nowhere", *more])
    assert told in capsys.readouterr().err
