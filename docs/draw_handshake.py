"""Draws the handshake's state machine from its table, `STEPS` in `mlxcel_nb/wire/machine.py`.

`python -m docs.draw_handshake --write` puts it in docs/wire.md; without `--write` it is printed.
`tests/wire/test_docs.py` holds the page against it, so the drawing cannot say anything else than the code does.
"""

from __future__ import annotations

from docs.marked import Marked, table
from mlxcel_nb.wire.hello import MessageType
from mlxcel_nb.wire.machine import BEGINNINGS, STEPS, Side, State, Step, title

PAGE = Marked("wire", __file__, "the state machine")

WIDTH = 66
"""Columns between the two sides."""


def label(message: MessageType | None) -> str:
    return "" if message is None else f"{message.value} {title(message)}"


def ladder() -> list[str]:
    """A handshake that succeeds, step by step: the messages, and on either side the states they lead to."""
    states = {side: state for side, (_, state) in BEGINNINGS.items()}
    lines = ["client".ljust(WIDTH - 6) + "server", *(_state(side, states[side]) for side in Side)]
    said = [(side, first) for side, (first, _) in BEGINNINGS.items() if first is not None]
    while said:
        side, message = said.pop()
        lines.append(_arrow(side, label(message)))
        other = Side.SERVER if side is Side.CLIENT else Side.CLIENT
        due: MessageType | None = message
        while (step := _step(other, states[other], due)) is not None:
            states[other], due = step.then, None  # what its owner decides follows by itself
            lines.append(_state(other, step.then))
            if step.says is not None:
                said.append((other, step.says))
    return lines


def _step(side: Side, state: State, takes: MessageType | None) -> Step | None:
    return next((step for step in STEPS if (step.side, step.state, step.takes) == (side, state, takes)), None)


def _state(side: Side, state: State) -> str:
    return state.name if side is Side.CLIENT else state.name.rjust(WIDTH)


def _arrow(side: Side, text: str) -> str:
    line = f" {text} ".center(WIDTH - 6, "─")
    return f"  │{line}▶│" if side is Side.CLIENT else f"  │◀{line}│"


def steps() -> list[str]:
    rows = []
    for step in STEPS:
        takes = "its owner's yes" if step.takes is None else title(step.takes)
        says = "" if step.says is None else title(step.says)
        rows.append((step.side.value, step.state.name, takes, says, step.then.name))
    return table(("side", "state", "takes", "says", "goes on to"), rows)


def draw() -> list[str]:
    return ["```text", *ladder(), "```", "", *steps()]


if __name__ == "__main__":
    PAGE.main(draw)
