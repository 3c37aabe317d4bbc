"""Answers in a real JupyterLab: they grow in the cell that asked, stop when told to, and stay when saved."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.browser.lab import Lab
from tests.browser.page import DISPLAYED, PRINTED, Notebook, Traffic, until

pytestmark = pytest.mark.timeout(150)

STOP_S = 1.0
"""From the press of the button to every rank being idle."""

ORPHANS_S = 15.0

TRIES = 3
"""Other tests share the machine: it must be possible within that time."""

IDLE = """
import time
from mlxcel_nb.commands.session import current
cluster = current().get().cluster
end = time.time() + 20
while {node.activity for node in cluster.status().nodes} != {"idle"}:
    assert time.time() < end, cluster.status()
print(time.time())
"""

CELLS = {
    "extension": "%load_ext mlxcel_nb",
    "start": "%mlxcel cluster start -n 2",
    "load": "%mlxcel load smollm2-135m --pp 2",
    **{
        f"{name}-{n}": code
        for n in range(TRIES)
        for name, code in [
            ("endless", "%%mlxcel generate --max-tokens 4000 --ignore-eos -o cut\n1, 2, 3, 4, 5, 6, 7, 8,"),
            ("idle", IDLE),
        ]
    },
    "next": "%%mlxcel generate --max-tokens 6\nThe capital of France is",
    "cut": "print(cut.finish_reason, cut.text)",
    "digits": "%%mlxcel generate --max-tokens 24 -o digits\n1, 2, 3, 4, 5, 6, 7, 8,",
    "letters": "%%mlxcel generate --max-tokens 24 -o letters\na, b, c, d, e, f,",
    "texts": "import json; print(json.dumps([digits.text, letters.text]))",
    "made": """
from mlxcel_nb import SamplingParams
one = cluster.stream("1, 2, 3, 4, 5, 6, 7, 8,", SamplingParams(max_tokens=12))
two = cluster.stream("a, b, c, d, e, f,", SamplingParams(max_tokens=12))
""",
    "taken": "for delta in one: print(delta.text, end='')",
    "between": "print('between')",
    "taken-too": "for delta in two: print(delta.text, end='')",
    "compared": "print(json.dumps([one.result().text, two.result().text]))",
    "fast": """
import time
from mlxcel_nb.client.report import Completion, Delta
from mlxcel_nb.commands.generate import answer
from mlxcel_nb.notebook.console import NotebookConsole

class Fast:
    "10000 tokens, 5000 of them a second."
    text, token_ids, completion, error, prefill, made = "", (), None, None, None, 0
    @property
    def done(self):
        return self.completion is not None
    def next(self, timeout):
        if self.made == 10000:
            self.completion = Completion(text=self.text, token_ids=(), finish_reason="length")
            return None
        if not self.made:
            self.begun = time.monotonic()
        # 5000 tokens a second: the pace is the case
        time.sleep(max(0, min(timeout, self.begun + self.made / 5000 - time.monotonic())))
        self.made += 1
        self.text += f"{self.made} "
        return Delta(f"{self.made} ")
    def cancel(self):
        pass

_ = answer(Fast(), NotebookConsole())
""",
    "reloaded": "%%mlxcel generate --max-tokens 4000 --ignore-eos\n1, 2, 3, 4, 5, 6, 7, 8,",
    "after-reload": "%%mlxcel generate --max-tokens 6\nThe capital of France is",
    "extension-again": "%load_ext mlxcel_nb",
    "start-again": "%mlxcel cluster start -n 2",
}


@pytest.fixture(scope="module")
def nb(page: Page, lab: Lab, traffic: Traffic) -> Notebook:
    """A notebook whose cluster has its model."""
    nb = Notebook.open(page, lab, CELLS)
    for name in ("extension", "start", "load"):
        nb[name].ok()
    return nb


def printed(saved: dict[str, Any], name: str) -> str:
    """What a cell of a saved notebook printed."""
    outputs = next(cell["outputs"] for cell in saved["cells"] if cell["id"] == name)
    return "".join(text for output in outputs if output["output_type"] == "stream" for text in output["text"])


def test_an_answer_grows_stops_at_the_button_and_the_cluster_answers_the_next_cell(nb: Notebook) -> None:
    took: list[float] = []
    while not took or (took[-1] >= STOP_S and len(took) < TRIES):
        cell, idle = nb[f"endless-{len(took)}"], nb[f"idle-{len(took)}"]
        answer = cell.record(PRINTED)
        cell.start()
        answer.wait_for_growth(5)
        pressed = nb.interrupt()
        idle.start()
        cell.wait()
        idle.wait()
        took.append(float(idle.text) - pressed)
    assert min(took) < STOP_S, took

    text = cell.text
    assert text.startswith(answer.growth[4])
    assert [line.split(" · ")[-1] for line in cell.shown] == ["cancelled"]
    assert cell.errors == idle.errors == []
    assert nb["cut"].ok().text == f"cancelled {text}"

    assert nb["next"].ok().text.startswith(" Paris")
    assert nb["next"].shown[-1].endswith("pp2 · length")


def test_the_answers_of_two_cells_do_not_mix(nb: Notebook) -> None:
    """Case 56."""
    first, second = nb["digits"].record(PRINTED), nb["letters"].record(PRINTED)
    nb["digits"].start()
    nb["letters"].start()
    nb["letters"].wait()
    digits, letters = json.loads(nb["texts"].ok().text)
    assert nb["digits"].text.rstrip("\n") == digits.rstrip("\n")
    assert nb["letters"].text.rstrip("\n") == letters.rstrip("\n")
    assert digits != letters
    assert first.states[-1][0] <= second.states[0][0]


def test_a_stream_prints_into_the_cell_that_takes_it_not_the_one_that_asked(nb: Notebook) -> None:
    """Case 56."""
    order = ("made", "taken", "between", "taken-too", "compared")
    for name in order:
        nb[name].start()
    nb["compared"].wait()
    one, two = json.loads(nb["compared"].text)
    assert [nb[name].text for name in order[:4]] == ["", one, "between\n", two]
    assert [nb[name].errors for name in order] == [[]] * 5


def test_a_fast_answer_is_few_messages_to_the_page_and_loses_nothing(nb: Notebook, traffic: Traffic) -> None:
    """Case 59."""
    traffic.frames.clear()
    begun = time.time()
    cell = nb["fast"].ok()
    seconds = time.time() - begun
    whole = "".join(f"{i} " for i in range(1, 10001))
    assert until(nb.page, lambda: cell.text.strip() == whole.strip(), 10)
    assert seconds >= 2
    busiest = max(sum(at <= other < at + 1 for other, _ in traffic.frames) for at, _ in traffic.frames)
    assert busiest < 200
    assert sum(size for _, size in traffic.frames) / seconds < 1e6

    assert printed(nb.save(), "fast").strip() == whole.strip()
    assert nb.path.stat().st_size < 1e6


def test_a_page_reloaded_in_the_middle_of_an_answer_shows_what_was_saved_and_can_stop_it(nb: Notebook) -> None:
    """Case 58."""
    answer = nb["reloaded"].record(PRINTED)
    nb["reloaded"].start()
    answer.wait_for_growth(5)
    begun = answer.growth[0]
    saved = printed(nb.save(), "reloaded")
    assert saved.startswith(begun)
    nb.reopen(kernel="busy")
    assert until(nb.page, lambda: nb["reloaded"].text == saved, 10), nb["reloaded"].text
    nb.interrupt()
    assert nb["after-reload"].ok().text.startswith(" Paris")


def test_restarting_the_kernel_ends_its_engines_and_the_next_start_works_at_once(nb: Notebook, lab: Lab) -> None:
    """Case 55."""
    assert len(lab.engines()) >= 3  # two engines and their controller
    nb.restart_kernel()
    assert until(nb.page, lambda: not lab.engines(), ORPHANS_S), lab.engines()
    nb["extension-again"].ok()
    states = nb["start-again"].record(DISPLAYED)
    nb["start-again"].ok()
    assert "is up after" in states.states[-1][1]
