"""Plain text in a terminal and in a pipe."""

from __future__ import annotations

import io

import pytest

from mlxcel_nb.commands.console import Progress, TerminalConsole
from mlxcel_nb.display.view import View, note
from mlxcel_nb.errors import Cancelled


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_results_and_remarks_go_different_ways() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = TerminalConsole(out, err)
    console.write("Par")
    console.write("is.")
    console.end_text()
    console.end_text()
    console.remark(note("2 tokens"))
    console.say("done")
    assert out.getvalue() == "Paris.\ndone\n"
    assert err.getvalue() == "2 tokens\n"


@pytest.mark.parametrize(("no_color", "shown"), [("", "\x1b[2mx\x1b[0m\n"), ("1", "x\n")])
def test_a_remark_is_dimmed_on_a_terminal_unless_no_color(
    monkeypatch: pytest.MonkeyPatch, no_color: str, shown: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    err = Terminal()
    TerminalConsole(io.StringIO(), err).remark(note("x"))
    assert err.getvalue() == shown


def test_text_for_a_terminal_is_made_harmless_and_for_a_pipe_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        TerminalConsole(out, io.StringIO()).write("\x1b[31m")
    assert (terminal.getvalue(), pipe.getvalue()) == ("␛[31m", "\x1b[31m")


def test_progress_rewrites_a_terminals_line_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    err = Terminal()
    with TerminalConsole(io.StringIO(), err).progress("Loading") as progress:
        progress.update(1, 2)
    assert err.getvalue() == "\r\x1b[KLoading ...\r\x1b[KLoading 100%\n"


def test_a_prompt_being_read_is_one_line_that_goes_away_and_none_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for err, shown in [
        (Terminal(), "\r\x1b[Kreading the prompt 256 of 600\r\x1b[K"),
        (io.StringIO(), ""),
    ]:
        console = TerminalConsole(io.StringIO(), err)
        console.reading((256, 600))
        console.reading(None)
        assert err.getvalue() == shown


def test_a_result_takes_the_place_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, err = io.StringIO(), Terminal()
    with TerminalConsole(out, err).progress("Loading") as progress:
        progress.finish(note("ready"))
    assert (err.getvalue(), out.getvalue()) == ("\r\x1b[KLoading ...\r\x1b[K", "ready\n")


def test_progress_in_a_pipe_is_a_few_lines() -> None:
    err = io.StringIO()
    with TerminalConsole(io.StringIO(), err).progress("Loading") as progress:
        for done in range(1000):
            progress.update(done, 1000)
    assert err.getvalue() == "Loading ...\nLoading 100%\n"


class Clocked:
    """A progress with a clock that the test turns."""

    def __init__(self) -> None:
        self.now = 0.0
        self.drawn: list[str] = []
        self.ended: list[tuple[str, bool]] = []

    def progress(self) -> Progress:
        return Progress(
            "P",
            draw=lambda view: self.drawn.append(view.text),
            end=self.end,
            interval_s=0.1,
            clock=lambda: self.now,
        )

    def end(self, view: View, result: bool) -> None:
        self.ended.append((view.text, result))
        self.html = view.html


def test_progress_draws_ten_times_a_second_and_always_the_end() -> None:
    clocked = Clocked()
    with clocked.progress() as progress:
        for step in range(1000):
            clocked.now = step / 1000
            progress.update(step, 1000)
    progress.update(5, 1000)
    assert len(clocked.drawn) <= 11
    assert clocked.ended == [("P 100%", False)]


@pytest.mark.parametrize(
    ("error", "word"), [(ValueError, "failed"), (KeyboardInterrupt, "stopped"), (Cancelled, "stopped")]
)
def test_what_does_not_end_well_leaves_a_word_and_no_bar(error: type[BaseException], word: str) -> None:
    clocked = Clocked()
    progress = clocked.progress()
    progress.__enter__()
    progress.update(1, 4)
    progress.__exit__(error, error("x"), None)
    assert clocked.ended == [(f"P: {word} at 25%", False)]
    assert "progressbar" not in clocked.html
