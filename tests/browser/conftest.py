"""One JupyterLab and one Chromium for the tests of this folder, and a fresh page for each file of them.

The fixtures end with the folder: while the browser is driven, its event loop runs in this thread, and other tests
have loops of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.lab import Lab, jupyter_lab
from tests.browser.page import Traffic, chromium_browser
from tests.waiting import words_of


@pytest.fixture(scope="package")
def nothing_left() -> Iterator[None]:
    """After the last test: no process that these tests started."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    started = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive, f"left running: {[(p.pid, words_of(p)[:6]) for p in alive]}"


@pytest.fixture(scope="package")
def lab(nothing_left: None, chromium: str, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with jupyter_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture(scope="package")
def browser(nothing_left: None, chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright, chromium_browser(playwright, chromium) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(lab: Lab, browser: Browser) -> Iterator[Page]:
    """High enough for a whole notebook: JupyterLab leaves cells outside of the view undrawn."""
    page = browser.new_page(viewport={"width": 1200, "height": 3600})
    yield page
    page.close()
    lab.stop_kernels()


@pytest.fixture(scope="module")
def traffic(page: Page, lab: Lab) -> Traffic:
    """What the page receives from its kernel and what it complains of, from the start."""
    return Traffic(page, lab)


@pytest.fixture(autouse=True)
def no_complaints(traffic: Traffic) -> Iterator[None]:
    """No test may leave an error on the page's console, or make it ask another host for anything."""
    yield
    complaints, traffic.complaints = traffic.complaints, []
    assert complaints == []
