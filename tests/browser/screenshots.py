"""Takes the pictures of docs/first-tokens.md: `python -m tests.browser.screenshots`.

They show the first notebook, run as its reader runs it, from the load to the status, in both themes of JupyterLab.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.lab import REPO, jupyter_lab
from tests.browser.page import PRINTED, Notebook, chromium_browser

IMAGES = REPO / "docs" / "images"
LESSON = REPO / "notebooks" / "01-first-tokens.ipynb"
WIDTH = 1200
MARGIN = 8
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}


def take(browser: Browser, theme: str) -> None:
    """Run the lesson, its second answer interrupted, and photograph it."""
    scratch = Path(tempfile.mkdtemp(prefix="mlxcel-pictures-"))
    try:
        with jupyter_lab(scratch, theme=THEMES[theme]) as lab:
            page = browser.new_page(viewport={"width": WIDTH, "height": 3600})
            nb = Notebook.open(page, lab, LESSON)
            nb.hide_side_bar()
            extension, start, load, ask, chat, status, stop, _python = nb.code_cells
            for cell in (extension, start, load, ask):
                cell.ok()
            answer = chat.record(PRINTED)
            chat.start()
            answer.wait_for_growth(20)
            nb.interrupt()
            chat.wait()
            status.ok()
            stop.root.click()  # the selection leaves the picture
            picture(page, nb, "code-6", "code-12", f"first-tokens-{theme}")
            page.close()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def picture(page: Page, nb: Notebook, first: str, last: str, name: str) -> None:
    """The notebook from one cell to another, both included."""
    top, bottom, frame = (found.bounding_box() for found in (nb[first].root, nb[last].root, nb.root))
    assert top and bottom and frame
    height = bottom["y"] + bottom["height"] - top["y"] + 2 * MARGIN
    clip = {"x": frame["x"], "y": top["y"] - MARGIN, "width": frame["width"], "height": height}
    page.screenshot(path=IMAGES / f"{name}.png", clip=clip)  # type: ignore[arg-type]


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "no Chromium on this machine"
    with sync_playwright() as playwright, chromium_browser(playwright, path) as browser:
        for theme in THEMES:
            take(browser, theme)


if __name__ == "__main__":
    main()
