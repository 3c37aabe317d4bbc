"""A notebook in Chromium, driven with keys and clicks; every wait is for a condition on the page.

`Notebook.open` writes the cells to a file, opens it and waits for its kernel. Cells are called by name.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Browser, Locator, Page, Playwright

from tests.browser.lab import Lab

OPEN_S = 40.0
CELL_S = 60.0

CHROMIUM_ARGUMENTS = [
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
KERNELSPEC = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}

PRINTED = '.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.stdout"]'
DISPLAYED = ".jp-OutputArea-output .jp-RenderedHTMLCommon, .jp-OutputArea-output.jp-RenderedHTMLCommon"
FAILED = ".jp-OutputArea-output" + ':is([data-mime-type$="jupyter.error"], [data-mime-type$="jupyter.stderr"])'

# Notes each text that one kind of output shows, with the time, as often as the page changes.
RECORD = """([cell, selector, name]) => {
  const states = window[name] = [];
  const look = () => {
    const shown = [...cell.querySelectorAll(selector)];
    const text = shown.map(part => part.textContent).join("\\n");
    if (shown.length && text !== states.at(-1)?.[1]) states.push([Date.now() / 1000, text]);
  };
  new MutationObserver(look).observe(cell, {childList: true, subtree: true, characterData: true});
}"""


@contextmanager
def chromium_browser(playwright: Playwright, path: str) -> Iterator[Browser]:
    browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_ARGUMENTS)
    try:
        yield browser
    finally:
        browser.close()


class Traffic:
    """What a page is sent over its web sockets, and what it must never do: log an error, ask another host."""

    def __init__(self, page: Page, lab: Lab) -> None:
        self.frames: list[tuple[float, int]] = []
        """Time and size of each message received."""
        self.complaints: list[str] = []
        ours = (lab.url, "data:", "blob:")
        page.on("websocket", lambda socket: socket.on("framereceived", self._received))
        page.on("console", lambda said: self._complain(said.type == "error", f"console: {said.text}"))
        page.on("pageerror", lambda error: self._complain(True, f"error: {error}"))
        page.on("request", lambda asked: self._complain(not asked.url.startswith(ours), f"request: {asked.url}"))

    def _received(self, data: str | bytes) -> None:
        self.frames.append((time.time(), len(data)))

    def _complain(self, wrong: bool, complaint: str) -> None:
        if wrong:
            self.complaints.append(complaint)


class Recording:
    """The states that a part of a cell went through, each with the time in seconds since the epoch."""

    def __init__(self, page: Page, name: str) -> None:
        self._page, self._name = page, name

    @property
    def states(self) -> list[tuple[float, str]]:
        return [(at, text) for at, text in self._page.evaluate("name => window[name]", self._name)]

    @property
    def texts(self) -> list[str]:
        return [text for _, text in self.states]

    @property
    def growth(self) -> list[str]:
        """The states that prolonged the one before."""
        texts = ["", *self.texts]
        return [now for before, now in itertools.pairwise(texts) if len(now) > len(before)]

    def wait_for_growth(self, steps: int, timeout: float = CELL_S) -> None:
        assert until(self._page, lambda: len(self.growth) >= steps, timeout), (
            f"waited {timeout:g} s for {steps} steps of growth, saw {len(self.growth)}: {self.states}"
        )


class Cell:
    """One code cell."""

    def __init__(self, page: Page, index: int, name: str) -> None:
        self._page, self.name = page, name
        self.root = page.locator(f'.jp-Notebook [data-windowed-list-index="{index}"]')

    @property
    def prompt(self) -> str:
        return self.root.locator(".jp-InputPrompt").inner_text().strip()

    @property
    def has_run(self) -> bool:
        return self.prompt[1:-2].isdigit()

    @property
    def text(self) -> str:
        """What it printed."""
        return "".join(self._texts(PRINTED))

    @property
    def shown(self) -> list[str]:
        """Its displays as a reader sees them."""
        return [part.inner_text() for part in self.root.locator(DISPLAYED).all()]

    @property
    def errors(self) -> list[str]:
        """Tracebacks, and what was printed to standard error."""
        return self._texts(FAILED)

    @property
    def bars(self) -> Locator:
        return self.root.locator('.jp-OutputArea [role="progressbar"]')

    def _texts(self, selector: str) -> list[str]:
        return [text or "" for text in self.root.locator(selector).all_text_contents()]

    def record(self, selector: str) -> Recording:
        """Follow a part of the outputs from now on."""
        handle = self.root.element_handle(timeout=CELL_S * 1e3)
        name = f"recording_{self.name}_{time.monotonic_ns()}"
        self._page.evaluate(RECORD, [handle, selector, name])
        return Recording(self._page, name)

    def start(self) -> None:
        """Run it with Ctrl-Enter; returns when the notebook has taken the order."""
        self.root.locator(".cm-content").click()
        self._page.keyboard.press("Control+Enter")
        assert until(self._page, lambda: self.prompt != "[ ]:", OPEN_S), f"cell {self.name} was not started"

    def wait(self, timeout: float = CELL_S) -> None:
        """Until the kernel is done with it."""
        done = until(self._page, lambda: self.has_run, timeout)
        assert done, f"cell {self.name} did not end within {timeout:g} s: {self.text!r} {self.shown!r} {self.errors}"

    def run(self, timeout: float = CELL_S) -> Cell:
        self.start()
        self.wait(timeout)
        return self

    def ok(self, timeout: float = CELL_S) -> Cell:
        """`run`, for a cell that has to succeed."""
        self.run(timeout)
        assert self.errors == []
        return self


class Notebook:
    """An open notebook with a kernel that is ready."""

    def __init__(self, page: Page, lab: Lab, path: Path, content: nbformat.NotebookNode) -> None:
        self.page, self.lab, self.path = page, lab, path
        self._cells = content.cells

    @classmethod
    def open(cls, page: Page, lab: Lab, cells: Mapping[str, str] | Path) -> Notebook:
        """Open a copy of a notebook, or a new one of named cells; those of a copy are called by their ids."""
        if isinstance(cells, Path):
            content = nbformat.read(cells, as_version=4)
        else:
            made = [new_code_cell(source, id=name) for name, source in cells.items()]
            content = new_notebook(cells=made, metadata={"kernelspec": KERNELSPEC})
        path = lab.notebooks / f"notebook-{time.monotonic_ns()}.ipynb"
        nbformat.write(content, path)
        notebook = cls(page, lab, path, content)
        notebook.reopen()
        return notebook

    def __getitem__(self, name: str) -> Cell:
        return Cell(self.page, [cell.id for cell in self._cells].index(name), name)

    @property
    def code_cells(self) -> list[Cell]:
        return [self[cell.id] for cell in self._cells if cell.cell_type == "code"]

    @property
    def root(self) -> Locator:
        return self.page.locator(".jp-Notebook")

    def reopen(self, kernel: str = "idle") -> None:
        """Load the saved file into a fresh workspace and wait for its kernel, which is a new one if there was none."""
        self.page.goto(self.lab.page(self.path.name), timeout=OPEN_S * 1e3)
        self.root.locator("[data-windowed-list-index]").first.wait_for(timeout=OPEN_S * 1e3)
        there = until(self.page, lambda: self._kernel_is(kernel), OPEN_S)
        assert there, f"waited {OPEN_S:g} s for the kernel of {self.path.name} to be {kernel}"

    def _kernel_is(self, state: str) -> bool:
        """The page alone does not know: it says idle before there is a kernel, and nothing when it finds a busy one."""
        if state == "idle" and self.page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').count() == 0:
            return False
        kernels = [s["kernel"] for s in self.lab.api("GET", "sessions") if s["path"] == self.path.name]
        return any(kernel["connections"] > 0 and kernel["execution_state"] == state for kernel in kernels)

    def interrupt(self) -> float:
        """Press the square in the toolbar; returns when that was."""
        button = self.page.locator('.jp-NotebookPanel-toolbar [data-jp-item-name="interrupt"] jp-button')
        button.wait_for()
        pressed = time.time()
        button.click()
        return pressed

    def run_all(self) -> None:
        """Run menu, *Run All Cells*."""
        self._choose("Run", "runmenu:run-all")

    def restart_kernel(self) -> None:
        """Kernel menu, *Restart Kernel…*, and yes."""
        self._choose("Kernel", "kernelmenu:restart")
        self.page.locator(".jp-Dialog .jp-mod-accept").click()

    def hide_side_bar(self) -> None:
        """Give the notebook the whole width."""
        self.page.keyboard.press("Control+b")
        self.page.locator("#jp-left-stack").wait_for(state="hidden")

    def _choose(self, menu: str, command: str) -> None:
        self.page.locator(".lm-MenuBar-itemLabel", has_text=menu).click()
        self.page.locator(f'.lm-Menu-item[data-command="{command}"]').click()

    def save(self) -> dict[str, Any]:
        """Save it as a user does; returns what then lies on the disk."""
        before = self.path.stat().st_mtime_ns
        self.root.press("Control+s")
        saved: dict[str, Any] = {}

        def is_saved() -> bool:
            if self.path.stat().st_mtime_ns != before:
                with contextlib.suppress(ValueError):  # half-written
                    saved.update(json.loads(self.path.read_text()))
            return bool(saved)

        assert until(self.page, is_saved, 20), f"{self.path.name} was not saved"
        return saved


def until(page: Page, condition: Callable[[], Any], timeout: float) -> bool:
    """Whether `condition` came true within `timeout` seconds; the browser's events are handled between the looks."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        page.wait_for_timeout(20)  # the pace of the looks, not what is waited for
    return True
