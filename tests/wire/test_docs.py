"""docs/wire.md and the code say the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from docs import draw_handshake
from mlxcel_nb.runtime import protocol
from mlxcel_nb.wire.dtypes import DTYPES
from mlxcel_nb.wire.frames import Kind
from mlxcel_nb.wire.handshake import RejectCode, VerdictCode
from mlxcel_nb.wire.hello import MessageType
from mlxcel_nb.wire.kv import KVType, Layout, Why
from mlxcel_nb.wire.machine import BEGINNINGS, STEPS, Side, State, title
from tests.wire.ends import golden_ends

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "wire.md").read_text(encoding="utf-8")


def rows(first_header: str) -> list[list[str]]:
    """Cells of the table whose first column is called `first_header`."""
    table = PAGE[PAGE.index(f"\n| {first_header} |") + 1 :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()[2:]]


def test_the_state_machine_is_drawn_from_the_table() -> None:
    drawn = draw_handshake.draw()
    assert all(step.state.name in "\n".join(drawn) for step in STEPS)
    assert drawn == draw_handshake.PAGE.lines(), "python -m docs.draw_handshake --write brings docs/wire.md up to date"


def test_a_script_prints_what_it_would_write() -> None:
    words = [sys.executable, "-m", "docs.draw_handshake"]
    ran = subprocess.run(words, cwd=DOCS.parent, capture_output=True, text=True, check=True, encoding="utf-8")
    assert ran.stdout.splitlines() == draw_handshake.PAGE.lines()


def test_a_handshake_goes_by_the_table() -> None:
    """What either side says at each step, and where it goes, is what the table says."""
    client, server = golden_ends()
    ends = {Side.CLIENT: client, Side.SERVER: server}
    said, state = BEGINNINGS[Side.CLIENT]
    assert client.state is state and server.state is BEGINNINGS[Side.SERVER][1] and BEGINNINGS[Side.SERVER][0] is None
    taken, side, data = [], Side.CLIENT, client.data_to_send()
    while said is not None:
        assert data[6] == said
        side = Side.SERVER if side is Side.CLIENT else Side.CLIENT
        step = next(s for s in STEPS if (s.side, s.state, s.takes) == (side, ends[side].state, said))
        ends[side].receive_data(data)
        assert ends[side].state is step.then
        taken.append(step)
        own = next((s for s in STEPS if (s.side, s.state, s.takes) == (side, step.then, None)), None)
        if own is not None:
            assert not server.data_to_send()
            server.verdict()
            assert server.state is own.then
            taken.append(own)
            step = own
        said, data = step.says, ends[side].data_to_send()
    assert not data and client.state is server.state is State.ESTABLISHED
    assert {step for step in STEPS if step.then is not State.FAILED} == set(taken)


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


def test_every_kv_message_layout_and_reason_is_on_the_page() -> None:
    assert [(int(row[0]), row[1]) for row in rows("KV")] == [(kind, kind.name.lower()) for kind in KVType]
    assert [(int(row[0]), row[1]) for row in rows("layout")] == [(layout, layout.name.lower()) for layout in Layout]
    refusals = PAGE[PAGE.index("What merely does not suit is refused") :].split("\n\n")[0]
    assert [int(code) for code in re.findall(r"\((\d)\)", refusals)] == list(Why)


def test_every_message_the_runtime_sends_is_on_the_page() -> None:
    sources = (Path(__file__).parents[2] / "mlxcel_nb" / "runtime").glob("*.py")
    sent = {name for source in sources for name in re.findall(r'"type": "(\w+)"', source.read_text(encoding="utf-8"))}
    assert sent <= {row[0] for row in rows("message")}


def test_the_page_and_the_runtime_list_the_same_messages() -> None:
    """All but the hello, which the links say of themselves."""
    table = str(protocol.__doc__).split("=" * 74 + "\n")[2]
    assert {line.split()[0] for line in table.splitlines()[:-1]} == {row[0] for row in rows("message")} - {"hello"}
