"""Types are checked at run time under pytest only; one thread, so that timings and sums do not depend on the machine."""

from jaxtyping import install_import_hook

hook = install_import_hook(["seqdiff"], "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
