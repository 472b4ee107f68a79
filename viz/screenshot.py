"""Picture of a review page: `python -m seqdiff.viz.screenshot review.html out.png [--scene 0 --future 3]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from seqdiff.viz.browser import NoBrowser, offline_page


def screenshot(
    page_file: Path,
    out: Path,
    at: tuple[int, int, int] | None = None,
    size: tuple[int, int] = (1400, 900),
    scale: float = 1.0,
) -> Path:
    """Write a PNG of the page, by a headless Chromium. `at` = (scene, future, step from t0); None = as it opens."""
    if not page_file.is_file():
        raise FileNotFoundError(
            f"no review page at {page_file}: write one with `seqdiff review samples=DIR out={page_file}`"
        )
    with offline_page(*size, scale) as (page, trouble):
        page.goto(page_file.resolve().as_uri() + ("#{},{},{}".format(*at) if at else ""))
        page.wait_for_selector("body[data-ready]", timeout=60_000)
        page.wait_for_timeout(300)
        out.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(out))
        if trouble:
            raise RuntimeError(f"the page is in trouble: {trouble[:3]}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m seqdiff.viz.screenshot", description="A PNG of a review page.")
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scene", type=int, help="number of the scene in the page")
    parser.add_argument("--future", type=int, default=0, help="sample number, -1 = the recorded truth")
    parser.add_argument("--step", type=int, default=0, help="step from t0")
    parser.add_argument("--size", type=int, nargs=2, default=(1400, 900), metavar=("W", "H"))
    parser.add_argument("--scale", type=float, default=1.0, help="device pixels a CSS pixel")
    a = parser.parse_args()
    at = None if a.scene is None else (a.scene, a.future, a.step)
    try:
        print(screenshot(a.page, a.out, at, tuple(a.size), a.scale))
    except (NoBrowser, FileNotFoundError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
