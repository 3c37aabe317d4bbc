"""The extension in a real kernel, before any cluster is started."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.kernels import Notebook, notebook

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def nb() -> Iterator[Notebook]:
    with notebook() as nb:
        nb.ok("%load_ext mlxcel_nb")
        yield nb


@pytest.mark.parametrize(
    ("code", "matches"),
    [
        ("%mlxcel cl", ["cluster"]),
        ("%mlxcel cluster ", ["start", "status", "stop", "list"]),
        ("%mlxcel load smoll", ["smollm2-135m", "smollm2-135m-4bit"]),
        ("%mlxcel load smollm2-135m --dtype ", ["auto", "native", "float32", "float16", "bfloat16"]),
        ("%%mlxcel generate --max", ["--max-tokens"]),
        ("x = 1\n%mlxcel unl", ["unload"]),
    ],
)
def test_completion_as_a_front_end_asks_for_it(nb: Notebook, code: str, matches: list[str]) -> None:
    assert nb.complete(code) == matches


def test_the_start_of_a_line_completes_to_the_commands_and_nothing_else(nb: Notebook) -> None:
    found = nb.complete("%mlxcel ")
    assert found[:3] == ["cluster", "status", "load"]
    assert not {"and", "if", "in"} & set(found)


def test_the_prompt_of_a_cell_is_not_completed_as_a_command(nb: Notebook) -> None:
    assert "cluster" not in nb.complete("%%mlxcel generate\n%mlxcel cl")


def test_the_last_words_of_a_missing_engine_stand_under_the_error(nb: Notebook) -> None:
    """Case 53."""
    ran = nb.run(
        "from mlxcel_nb.errors import ClusterError\n"
        "error = ClusterError('missing: engine-1')\n"
        "error.add_note('engine-1 said last:\\nImportError: libwhatever')\n"
        "raise error"
    )
    shown = ["ClusterError: missing: engine-1", "    engine-1 said last:", "    ImportError: libwhatever"]
    assert ran.error.splitlines() == shown


@pytest.mark.parametrize("ask", ["%mlxcel -h", "%mlxcel cluster -h", "%mlxcel generate --help", "%%mlxcel chat -h\nhi"])
def test_help_is_printed_and_ends_nothing(nb: Notebook, ask: str) -> None:
    assert nb.ok(ask).text.startswith("usage: %mlxcel")


def test_a_question_mark_shows_the_same_help(nb: Notebook) -> None:
    ran = nb.run("%mlxcel?")
    reply = nb.client.execute_interactive("%mlxcel?", timeout=30, output_hook=lambda message: None)
    text = reply["content"]["payload"][0]["data"]["text/plain"]
    assert ran.status == "ok"
    for command in ("cluster", "load", "generate", "chat"):
        assert command in text


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("%mlxcel statsu", "UsageError: no such command 'statsu', perhaps status. See: %mlxcel -h"),
        ("%mlxcel", "UsageError: %mlxcel needs a command"),
        ("%mlxcel status", "ClusterError: no cluster is running. Start one: %mlxcel cluster start -n 2"),
        ("%%mlxcel generate\nhi", "ClusterError: no cluster is running"),
        ("%%mlxcel generate --temp -1\nhi", "RequestError: temperature must be from 0"),
        ("%%mlxcel generate --stop ''\nhi", "RequestError: stop must be non-empty strings"),
        ("%%mlxcel generate -o 1x\nhi", "UsageError: '1x' is not a variable's name"),
        ("%mlxcel generate", "UsageError: there is no prompt. Write it under a first line of %%mlxcel generate"),
        ("%%mlxcel cluster stop\nhi", "UsageError: this command takes no text in its cell"),
        ("%%mlxcel chat --system Don't\nhi", "UsageError: a quote is not closed"),
        ("%mlxcel model rm nothing", "ModelError: the cache holds no model named 'nothing'"),
    ],
)
def test_an_error_is_a_line_or_two_that_say_what_to_do(nb: Notebook, code: str, says: str) -> None:
    ran = nb.run(code)
    assert ran.status == "error"
    shown = ran.error or "".join(c["text"] for c in ran.of("stream"))
    assert says in shown
    assert len(shown.strip().splitlines()) <= 2
    assert "Traceback" not in shown


def test_a_magic_returns_nothing_to_show_twice(nb: Notebook) -> None:
    ran = nb.ok("%mlxcel version")
    assert "mlxcel-nb" in ran.plain
    assert len(ran.of("display_data")) == 1 and not ran.of("execute_result")
    assert set(ran.of("display_data")[0]["data"]) == {"text/plain", "text/html"}


def test_where_nothing_fits_nothing_is_offered(nb: Notebook) -> None:
    for line in ("cluster start --name ", "status --cluster ", "status --cluster n", "generate --max-tokens "):
        assert nb.complete(f"%mlxcel {line}") == []


def test_loading_twice_and_unloading_leave_one_of_each_and_none(nb: Notebook) -> None:
    count = "sum(m.__name__ == 'matcher' for m in get_ipython().Completer.custom_matchers)"
    nb.ok("%reload_ext mlxcel_nb")
    nb.ok("get_ipython().extension_manager.loaded.discard('mlxcel_nb')\n%load_ext mlxcel_nb")
    assert nb.value(count) == 1
    nb.ok("%unload_ext mlxcel_nb")
    assert nb.value(count) == 0
    assert nb.run("%mlxcel version").status == "error"
    nb.ok("%load_ext mlxcel_nb")
    assert nb.value(count) == 1
    nb.ok("%mlxcel version")


FAST = """
from mlxcel_nb.client.report import Completion, Delta
from mlxcel_nb.notebook.console import NotebookConsole
from mlxcel_nb.commands.generate import answer

class Fast:
    "5000 tokens as fast as they can be taken."
    text, token_ids, completion, error, prefill, made = "", (), None, None, None, 0
    @property
    def done(self):
        return self.completion is not None
    def next(self, timeout):
        if self.made == 5000:
            self.completion = Completion(text=self.text, token_ids=(), finish_reason="length", generation_tokens=5000)
            return None
        self.made += 1
        self.text += f"token{self.made} "
        return Delta(f"token{self.made} ")
    def cancel(self):
        pass

_ = answer(Fast(), NotebookConsole())
"""


def test_five_thousand_tokens_at_full_speed_are_few_messages_and_lose_nothing(nb: Notebook) -> None:
    """Case 59."""
    ran = nb.ok(FAST)
    assert ran.text == "".join(f"token{i} " for i in range(1, 5001)) + "\n"
    seconds = max(ran.arrivals[-1] - ran.arrivals[0], 1.0)
    assert len(ran.messages) / seconds < 200
    assert ran.bytes / seconds < 1e6
    assert ran.plain.endswith("5000 tokens · length")


def test_progress_updates_one_display_and_ends_with_its_last_state(nb: Notebook) -> None:
    ran = nb.ok("""
import time
from mlxcel_nb.notebook.console import NotebookConsole
began = time.monotonic()
with NotebookConsole().progress("Loading m") as p:
    for i in range(20000):
        p.update(i, 20000, f"{i}")
took = time.monotonic() - began
""")
    took = float(nb.value("took"))
    assert len(ran.of("display_data")) == 1
    assert len(ran.of("update_display_data")) <= 1 + 10 * max(1.0, took)
    assert ran.plain == "Loading m 100%"


def test_a_prompt_being_read_is_one_display_that_is_empty_in_the_end(nb: Notebook) -> None:
    ran = nb.ok("""
from mlxcel_nb.notebook.console import NotebookConsole
console = NotebookConsole()
for prefill in ((256, 600), (512, 600), None):
    console.reading(prefill)
""")
    shown = [content["data"]["text/plain"] for content in ran.of("display_data", "update_display_data")]
    assert shown == ["reading the prompt 256 of 600", "reading the prompt 512 of 600", ""]
    assert len(ran.of("display_data")) == 1 and ran.plain == ""


def test_an_interrupt_of_a_ping_that_connects_ends_the_cell_within_a_second(nb: Notebook, tmp_path: Path) -> None:
    key = tmp_path / "secret"
    key.write_bytes(b"of this test, and long enough")
    key.chmod(0o600)
    pid, took = nb.value("__import__('os').getpid()"), []
    for _ in range(3):  # other tests share the machine: it must be possible
        pressed: list[float] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(20)
            pressing = threading.Thread(target=_press_when_called, args=(pid, server, pressed))
            pressing.start()
            ran = nb.run("%mlxcel net ping {}:{} --secret-file {}".format(*server.getsockname(), key))
            took.append(time.monotonic() - pressed[0])
            pressing.join()
        assert ran.status == "error" and "interrupted: %mlxcel net ping" in ran.error
        if took[-1] < 1.0:
            break
    assert min(took) < 1.0, took
    left = "[thread.name for thread in __import__('threading').enumerate() if 'ping' in thread.name]"
    assert nb.value(left) == []


def _press_when_called(pid: int, server: socket.socket, pressed: list[float]) -> None:
    """Interrupt the kernel `pid` while it connects to `server`, which says nothing until the other end has given up."""
    with server.accept()[0] as sock:
        sock.settimeout(20)
        pressed.append(time.monotonic())
        os.kill(pid, signal.SIGINT)
        while sock.recv(4096):
            pass
