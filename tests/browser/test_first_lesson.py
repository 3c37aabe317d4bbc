"""The first notebook as a newcomer meets it: all cells run in JupyterLab, saved, and read again without a kernel."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

from tests.browser.lab import REPO, Lab
from tests.browser.page import DISPLAYED, PRINTED, Notebook, Traffic

pytestmark = pytest.mark.timeout(150)

LESSON = REPO / "notebooks" / "01-first-tokens.ipynb"


def test_the_lesson_runs_from_top_to_bottom_and_reads_the_same_when_it_is_opened_again(
    page: Page, lab: Lab, traffic: Traffic
) -> None:
    """Case 58."""
    nb = Notebook.open(page, lab, LESSON)
    extension, start, load, ask, chat, status, stop, python = nb.code_cells
    starting, loading = start.record(DISPLAYED), load.record(DISPLAYED)
    answer = chat.record(PRINTED)
    nb.run_all()
    python.wait(90)
    assert [cell.errors for cell in nb.code_cells] == [[]] * 8

    assert starting.texts[0].startswith("Starting 2 engines")
    assert "is up after" in starting.texts[-1]
    assert any("%" in state and "MB of" in state for state in loading.texts[:-1])
    assert "smollm2-135m is ready after" in loading.texts[-1]
    assert load.bars.count() == 0
    assert "0-14" in load.shown[-1] and "15-29" in load.shown[-1]
    assert "Paris" in ask.text
    assert len(answer.growth) >= 5
    for cell in (ask, chat):
        assert "tokens/s" in cell.shown[-1] and "pp2" in cell.shown[-1]
    assert status.shown[0].count("alive") == 2
    assert status.shown[0].count("AES-256-GCM") == 3
    assert stop.shown[0].startswith("Stopped")
    assert "tp2" in python.text and extension.text == ""

    before = [(cell.text, cell.shown) for cell in nb.code_cells]
    nb.save()
    lab.stop_kernels()
    assert lab.engines() == []  # each cluster was stopped in its cell
    nb.reopen()
    assert [(cell.text, cell.shown) for cell in nb.code_cells] == before
