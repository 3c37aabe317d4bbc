"""`discover`: whose secret it uses, and what it prints."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxcel_nb.cluster.secret import Secret, Secrets
from mlxcel_nb.commands import discover, parser, tree
from mlxcel_nb.commands.console import TerminalConsole
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.parser import Where
from mlxcel_nb.commands.session import Held, Session
from mlxcel_nb.errors import ConfigError, SecretError
from mlxcel_nb.net.discovery import beacons as discovery
from mlxcel_nb.net.discovery.findings import Findings

FOUND = Findings(
    nodes=(), clocks={}, foreign=2, elsewhere=0, replayed=0, malformed=0, crowded=0, troubles=(), interfaces=("lo",),
    now=1.0,
)  # fmt: skip


def given(line: str, where: Where = Where.SHELL):
    return parser.parse(tree.build(where), parser.split(f"discover {line}"))


def session_with(name: str | None) -> Session:
    session = Session()
    if name:
        session._held[name] = Held(
            SimpleNamespace(
                name=name, secret=Secret(b"of the notebook's own"), secret_is_random=True, stop=lambda: None
            )
        )
    return session


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"one from a file of its own")
    path.chmod(0o600)
    return path


def test_a_notebook_s_own_cluster_lends_its_name_and_secret() -> None:
    assert discover._whose(given("", Where.MAGIC), session_with("lab")) == (
        "lab",
        Secrets(Secret(b"of the notebook's own")),
    )


def test_only_a_cluster_s_own_random_secret_is_one_that_nobody_else_knows(key: Path) -> None:
    held = session_with("lab")
    assert discover._is_private(given("", Where.MAGIC), held)
    held.get("lab").cluster.secret_is_random = False
    assert not discover._is_private(given("", Where.MAGIC), held)
    held.get("lab").cluster.secret_is_random = True
    assert not discover._is_private(given(f"--secret-file {key}"), held)
    assert not discover._is_private(given("--cluster other"), held)


def test_a_file_comes_first_and_the_cluster_s_name_has_a_default(key: Path) -> None:
    ours = Secret(b"one from a file of its own")
    assert discover._whose(given(f"--secret-file {key}"), session_with("lab")) == ("mlxcel", Secrets(ours))
    line = f"--secret-file {key} --previous-secret-file {key} --cluster x"
    assert discover._whose(given(line), session_with(None)) == ("x", Secrets(ours, ours))


def test_without_any_secret_it_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch, key: Path) -> None:
    monkeypatch.delenv("MLXCEL_CLUSTER_SECRET_FILE", raising=False)
    with pytest.raises(SecretError, match="--secret-file"):
        discover._whose(given(""), session_with(None))
    monkeypatch.setenv("MLXCEL_CLUSTER_SECRET_FILE", str(key))
    assert discover._whose(given("--cluster x"), session_with(None))[0] == "x"


def run(monkeypatch: pytest.MonkeyPatch, key: Path, line: str, answer: object) -> tuple[int, str]:
    async def listen(*_: object, **options: object) -> object:
        assert options["seconds"] == 0.5
        assert (options["announce"] is not None) == ("--announce" in line)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(discovery, "discover", listen)
    out = io.StringIO()
    context = Context(TerminalConsole(out, io.StringIO()), session_with(None))
    return discover.discover(given(f"--secret-file {key} --seconds 0.5 {line}"), context), out.getvalue()


def test_nobody_heard_is_exit_status_one_and_json_is_one_line(monkeypatch: pytest.MonkeyPatch, key: Path) -> None:
    status, said = run(monkeypatch, key, "--announce", FOUND)
    assert status == 1 and "Nothing was heard" in said and "2 made with another secret" in said
    status, said = run(monkeypatch, key, "--json", FOUND)
    assert status == 1 and said.count("\n") == 1 and '"foreign": 2' in said


def test_a_port_that_cannot_be_shared_is_the_error(monkeypatch: pytest.MonkeyPatch, key: Path) -> None:
    with pytest.raises(ConfigError, match="held"):
        run(monkeypatch, key, "", ConfigError("the port is held"))
