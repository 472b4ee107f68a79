"""A headless Chromium that may not touch the network, for the page's tests and pictures. Needs `playwright`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class NoBrowser(RuntimeError):
    """No Chromium or no playwright here. The text says which and what to install."""


def chromium() -> str:
    """Path of the browser: the environment variable CHROMIUM, else the first known name on the path."""
    asked = os.environ.get("CHROMIUM")
    found = asked if asked and os.path.exists(asked) else next(filter(None, map(shutil.which, NAMES)), None)
    if asked and found != asked:
        raise NoBrowser(f"CHROMIUM={asked} is not there: name the path of a Chromium or Chrome")
    if not found:
        raise NoBrowser(
            f"no browser found (looked for {', '.join(NAMES)}): install Chromium or set CHROMIUM to its path"
        )
    return found


@contextmanager
def offline_page(width: int = 1400, height: int = 900, scale: float = 1.0) -> Iterator[tuple[Any, list[str]]]:
    """Yields (page, trouble): a playwright page, and a list that fills with network requests and script errors."""
    path = chromium()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise NoBrowser(
            "the package playwright is missing: pip install playwright (no browser download needed)"
        ) from error
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            context = browser.new_context(
                viewport={"width": width, "height": height}, device_scale_factor=scale, offline=True
            )
            page = context.new_page()
            trouble: list[str] = []

            def refuse(dialog: Any) -> None:
                trouble.append(f"dialog {dialog.message}")
                dialog.dismiss()

            page.on(
                "request",
                lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else trouble.append(f"request {r.url}"),
            )
            page.on(
                "console",
                lambda m: trouble.append(f"console {m.type}: {m.text}") if m.type in ("error", "warning") else None,
            )
            page.on("pageerror", lambda e: trouble.append(f"error {e}"))
            page.on("dialog", refuse)
            yield page, trouble
        finally:
            browser.close()
