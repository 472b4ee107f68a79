"""What a user installs: the folders that are links in the checkout are real files in the wheel and the sdist."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow
BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def run(args: list[str], cwd: Path, **env: str) -> str:
    done = subprocess.run(args, cwd=cwd, capture_output=True, text=True, timeout=300, env=os.environ | env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """A wheel or an sdist by setuptools' own hooks."""
    out.mkdir(parents=True, exist_ok=True)
    return out / run([sys.executable, "-c", BUILD, f"build_{kind}", str(out)], source).splitlines()[-1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git knows, as they are now, links kept as links: no leftovers of earlier builds."""
    out = tmp_path_factory.mktemp("clean") / "checkout"
    for name in run(["git", "ls-files", "-zco", "--exclude-standard"], ROOT).split("\0"):
        if name and (ROOT / name).is_symlink() | (ROOT / name).exists():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, out / name, follow_symlinks=False)
    return out


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel made from the sdist, unpacked: what `pip install seqdiff` puts on the path."""
    folder = tmp_path_factory.mktemp("from_sdist")
    with tarfile.open(sdist) as tar:
        tar.extractall(folder, filter="data")
    wheel = build("wheel", next(folder.iterdir()), folder / "dist")
    out = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out)
    return out


def package_files(base: Path) -> set[str]:
    """What must be in the package: all of the four folders and the core that git knows."""
    known = run(
        ["git", "ls-files", "-zco", "--exclude-standard", "seqdiff", "domains", "viz", "configs", "tools"], base
    ).split("\0")
    names = {n if n.startswith("seqdiff/") else f"seqdiff/{n}" for n in known if n}
    return names - {f"seqdiff/{n}" for n in ("domains", "viz", "configs", "tools")}


def test_the_sdist_holds_the_links_targets(sdist, checkout):
    with tarfile.open(sdist) as tar:
        members = {m.name.split("/", 1)[1]: m for m in tar.getmembers() if "/" in m.name}
    missing = {n for n in package_files(ROOT) if (ROOT / n).exists() and n not in members}
    # the folders may stand there as themselves, as long as the wheel made of it is whole (next test)
    assert not {n for n in missing if n.removeprefix("seqdiff/") not in members}
    assert {"pyproject.toml", "README.md"} <= set(members)


def test_the_wheel_made_from_the_sdist_is_whole(unpacked):
    have = {str(p.relative_to(unpacked)) for p in unpacked.rglob("*") if p.is_file()}
    assert not any(p.is_symlink() for p in unpacked.rglob("*"))
    wanted = {n for n in package_files(ROOT) if (ROOT / n).exists()}
    assert not wanted - have
    for name in (
        "py.typed",
        "configs/config.yaml",
        "configs/experiment/demo.yaml",
        "domains/trajectory/embedded/traffic.npz",
    ):
        assert f"seqdiff/{name}" in have, name
    assert any(n.startswith("seqdiff/viz/page/") and n.endswith(".js") for n in have)
    tops = {p.name for p in unpacked.iterdir()}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"seqdiff"}  # no top-level domains, tools, tests


def test_the_wheel_made_from_the_checkout_is_the_same(checkout, unpacked, tmp_path):
    wheel = build("wheel", checkout, tmp_path)
    assert wheel.stat().st_size < 8_000_000
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if n.startswith("seqdiff/")}
    assert names == {str(p.relative_to(unpacked)) for p in (unpacked / "seqdiff").rglob("*") if p.is_file()}


def isolated(site: Path, code: str, cwd: Path) -> str:
    """Python without PYTHONPATH, without the current folder, with the unpacked wheel first."""
    start = f"import sys; sys.path.insert(0, {str(site)!r}); "
    return run([sys.executable, "-I", "-c", start + code], cwd, XDG_CACHE_HOME=str(cwd / "cache"))


def test_it_imports_and_runs_away_from_the_checkout(unpacked, tmp_path):
    where = isolated(unpacked, "import seqdiff.domains.trajectory.store as m; print(m.__file__)", tmp_path)
    assert where.strip() == str(unpacked / "seqdiff" / "domains" / "trajectory" / "store.py")
    for args in (["--help"], ["fit", "--help"], ["sample", "--help"]):
        out = isolated(unpacked, f"from seqdiff.cli import main; sys.exit(main({args!r}))", tmp_path)
        assert out.startswith("usage: seqdiff ")
    code = """
from seqdiff.compose import compose
from seqdiff.domains.trajectory.readers.recordings import Recordings
from seqdiff.checkpoint import commit
print(compose(["experiment=demo"])["model"]["net"]["class_path"], len(Recordings.embedded()) > 0, commit())
"""
    assert isolated(unpacked, f"exec({code!r})", tmp_path).split() == ["seqdiff.dit.DiT", "True", "unknown"]
    entry = next(unpacked.glob("*.dist-info/entry_points.txt")).read_text()
    assert "seqdiff = seqdiff.cli:main" in entry
