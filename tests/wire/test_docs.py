"""docs/wire.md and the code say the same."""

from __future__ import annotations

import re
from pathlib import Path

from mlxcel_nb.runtime import protocol
from mlxcel_nb.wire.dtypes import DTYPES
from mlxcel_nb.wire.frames import Kind
from mlxcel_nb.wire.handshake import ClientHandshake, RejectCode, ServerHandshake, VerdictCode
from mlxcel_nb.wire.hello import MessageType
from mlxcel_nb.wire.machine import title

PAGE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text(encoding="utf-8")


def rows(first_header: str) -> list[list[str]]:
    """Cells of the table whose first column is called `first_header`."""
    table = PAGE[PAGE.index(f"\n| {first_header} |") + 1 :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()[2:]]


def test_every_state_takes_what_the_page_says() -> None:
    expected = [
        [side, state.name, title(kind)]
        for side, end in (("client", ClientHandshake), ("server", ServerHandshake))
        for state, kind in end._EXPECTED.items()
    ]
    assert rows("side") == expected


def test_every_message_code_and_kind_is_on_the_page() -> None:
    assert [int(row[0]) for row in rows("type")] == list(MessageType)
    assert [row[1] for row in rows("type")] == [title(kind) for kind in MessageType]
    assert [int(row[0]) for row in rows("Reject")] == list(RejectCode)
    assert [int(row[0]) for row in rows("Verdict")] == list(VerdictCode)
    names = [name for row in rows("kind") for name in row[1].split(", ")]
    assert names == [kind.name.lower() for kind in Kind]


def test_every_dtype_is_on_the_page() -> None:
    cells = [tuple(row[at : at + 3]) for row in rows("dtype") for at in (0, 3)]
    assert sorted((int(code), name, int(size)) for code, name, size in cells) == [
        (dtype.code, dtype.name, dtype.itemsize) for dtype in DTYPES
    ]


def test_every_message_the_runtime_sends_is_on_the_page() -> None:
    sources = (Path(__file__).parents[2] / "mlxcel_nb" / "runtime").glob("*.py")
    sent = {name for source in sources for name in re.findall(r'"type": "(\w+)"', source.read_text(encoding="utf-8"))}
    assert sent <= {row[0] for row in rows("message")}


def test_the_page_and_the_runtime_list_the_same_messages() -> None:
    """All but the hello, which the links say of themselves."""
    table = str(protocol.__doc__).split("=" * 74 + "\n")[2]
    assert {line.split()[0] for line in table.splitlines()[:-1]} == {row[0] for row in rows("message")} - {"hello"}
