"""Who may import whom, read from the sources, and what an import really loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = sorted((ROOT / "seqdiff").glob("*.py"))
VIZ = sorted((ROOT / "viz").rglob("*.py"))
DOMAINS = sorted((ROOT / "domains").rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return names


def at_import(path: Path) -> set[str]:
    """Those that run when the file itself is imported."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [ast.Pass()]
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return names


def within(names: set[str], *packages: str) -> list[str]:
    return sorted(n for n in names if any(n == p or n.startswith(p + ".") for p in packages))


def test_the_files_are_found():
    assert len(CORE) >= 15 and len(VIZ) >= 5 and len(DOMAINS) >= 20


@pytest.mark.parametrize("path", CORE, ids=lambda p: p.name)
def test_the_core_knows_no_domain_and_no_plots(path):
    names = imported(path)
    assert not within(names, "seqdiff.domains", "seqdiff.viz", "seqdiff.tools", "seqdiff.configs", "plotly")
    if path.name == "compose.py":  # the one file that speaks to Hydra, and only when asked to compose
        assert within(names, "hydra") and not within(at_import(path), "hydra", "omegaconf")
    else:
        assert not within(names, "hydra", "omegaconf")
    if path.name not in ("cli.py", "fit.py", "compose.py", "lightning_cli.py", "checkpoint.py"):
        assert not within(names, "jsonargparse", "seqdiff.cli", "seqdiff.compose", "seqdiff.fit")


@pytest.mark.parametrize("path", VIZ, ids=lambda p: p.name)
def test_pages_know_no_model(path):
    models = [
        f"seqdiff.{n}"
        for n in ("task", "dit", "codec", "objectives", "ema", "checkpoint", "generate", "steps", "sample")
    ]
    assert not within(imported(path), *models, "seqdiff.domains.trajectory.adapter", "lightning", "hydra")


@pytest.mark.parametrize("path", DOMAINS, ids=lambda p: p.name)
def test_domains_know_no_page_and_no_command_line(path):
    assert not within(imported(path), "seqdiff.viz", "seqdiff.cli", "seqdiff.compose", "plotly", "hydra")


@pytest.mark.parametrize("path", [*CORE, *VIZ, *DOMAINS, *sorted((ROOT / "tools").rglob("*.py"))], ids=lambda p: p.name)
def test_our_parts_are_imported_by_their_full_name(path):
    assert not within(imported(path), "domains", "viz", "configs", "tools")


def loaded_by(module: str) -> set[str]:
    code = f"import sys, {module}; print(' '.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return {name.split(".")[0] if not name.startswith("seqdiff.") else name for name in run.stdout.split()}


def test_the_command_line_starts_light():
    assert not {"torch", "lightning", "hydra", "jsonargparse", "plotly"} & loaded_by("seqdiff.cli")


@pytest.mark.slow
def test_what_an_import_of_the_task_loads():
    loaded = loaded_by("seqdiff.task")
    assert not {"hydra", "omegaconf", "plotly", "pyarrow", "shapely", "pandas"} & loaded
    assert not {n for n in loaded if n.startswith(("seqdiff.domains", "seqdiff.viz", "seqdiff.tools", "seqdiff.cli"))}


@pytest.mark.slow
def test_what_an_import_of_the_page_loads():
    loaded = loaded_by("seqdiff.viz.review")
    assert (
        not {"lightning", "hydra", "seqdiff.task", "seqdiff.dit", "seqdiff.codec", "seqdiff.domains.trajectory.adapter"}
        & loaded
    )
