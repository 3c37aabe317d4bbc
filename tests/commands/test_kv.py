"""`kv`: what is saved and loaded, and what becomes of the conversation."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.client.saved_kv import KvReport
from mlxcel_nb.commands import dispatch
from mlxcel_nb.commands.console import TerminalConsole
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.parser import UsageProblem, Where, parse
from mlxcel_nb.commands.session import Held, Session
from mlxcel_nb.commands.tree import build
from mlxcel_nb.errors import ConfigError, ModelError
from tests.models.test_kv_file import save

TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


class Loaded:
    """As much of a cluster as the commands ask of it."""

    name = "a"
    model = "tiny"

    def __init__(self) -> None:
        self.saved: list[tuple[str, str | None, list[dict[str, str]]]] = []
        self.tokens = 64
        self.messages: tuple[dict[str, str], ...] = ()

    def save_kv(self, name: str, prompt: str | None, *, conversation: Any, on_progress: Any) -> KvReport:
        on_progress(32, 64)
        self.saved.append((name, prompt, list(conversation)))
        return self._report(name)

    def load_kv(self, name: str, *, on_progress: Any) -> KvReport:
        on_progress(32, 64)
        return self._report(name)

    def stop(self) -> None:
        pass

    def _report(self, name: str) -> KvReport:
        return KvReport(
            name=name, path=Path("f"), model="tiny", tokens=self.tokens, saved_tokens=64, nbytes=2_000_000,
            layout="pp2", saved_layout="tp2", seconds=0.1, messages=self.messages,
        )  # fmt: skip


class Told:
    """A notebook with one cluster."""

    def __init__(self) -> None:
        self.cluster: Any = Loaded()
        self.held = Held(self.cluster)
        self.session = Session()
        self.session._held = {"a": self.held}

    def run(self, *words: str, cell: str | None = None, where: Where = Where.MAGIC) -> str:
        out = io.StringIO()
        console = TerminalConsole(out, out)
        assert dispatch.run(parse(build(where), ["kv", *words]), Context(console, self.session, prompt=cell)) == 0
        return out.getvalue()


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.setenv("MLXCEL_NB_CACHE", str(tmp_path))
    return Told()


def test_a_conversation_is_saved_with_what_was_read_of_it_and_goes_on_elsewhere(told: Told) -> None:
    told.held.conversation.instruct("Be brief.")
    told.held.conversation.turns += TURNS
    assert "64 tokens are saved as talk, 2 MB" in told.run("save", "talk")
    told.cluster.messages = tuple(told.cluster.saved[0][2])
    told.held.conversation.instruct(None)
    assert "64 tokens of talk are there, saved as tp2; chat goes on after 2 turns." in told.run("load", "talk")
    assert told.held.conversation.system == "Be brief." and told.held.conversation.turns == TURNS


def test_a_prompt_of_its_own_is_saved_without_the_conversation(told: Told) -> None:
    told.held.conversation.turns += TURNS
    told.run("save", "doc", cell="A long text.\n")
    told.run("save", "doc", "--prompt", "Another.")
    assert told.cluster.saved == [("doc", "A long text.", []), ("doc", "Another.", [])]
    with pytest.raises(UsageProblem):
        told.run("save", "doc", "--prompt", "x", cell="y")


def test_what_there_was_no_room_for_is_said_and_without_turns_the_conversation_stays(told: Told) -> None:
    told.cluster.tokens = 32
    told.held.conversation.turns += TURNS
    assert "32 tokens of doc are there, saved as tp2; for the other 32 there is no room." in told.run("load", "doc")
    assert told.held.conversation.turns == TURNS


def test_a_name_that_cannot_be_is_refused_before_anything_is_read(told: Told) -> None:
    with pytest.raises(ConfigError, match=r"'\.\./x' is no name"):
        told.run("save", "../x")
    assert not told.cluster.saved


def test_they_are_listed_and_removed_in_a_shell_too(told: Told, tmp_path: Path) -> None:
    assert told.run("list", where=Where.SHELL) == "Nothing has been saved.\n"
    save(tmp_path / "kv" / "doc.safetensors")
    (tmp_path / "kv" / "bent.safetensors").write_bytes(b"no")
    shown = told.run("list", where=Where.SHELL)
    assert "doc" in shown and "tiny" in shown and "tp2" in shown and "float32" in shown
    assert "it has no header" in shown
    assert "Removed doc" in told.run("remove", "doc", where=Where.SHELL)
    with pytest.raises(ModelError, match="nothing is saved as doc"):
        told.run("remove", "doc", where=Where.SHELL)
    with pytest.raises(UsageProblem, match="works only in a notebook"):
        parse(build(Where.SHELL), ["kv", "save", "x"])
