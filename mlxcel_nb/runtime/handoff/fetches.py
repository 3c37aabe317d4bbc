"""Sequences that are read elsewhere, as the leader of those that go on with them keeps account of. On the MLX thread.

It asks one reader after another, and reads a prompt itself when none is left. The token that follows a prompt is told
as soon as it has been made, while keys and values are still on their way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxcel_nb.errors import WireError
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.models.sampling import Sampled
from mlxcel_nb.runtime.handoff.account import Account
from mlxcel_nb.runtime.outcomes import heard as outcome_of
from mlxcel_nb.runtime.protocol import GenerateOrder
from mlxcel_nb.runtime.protocol import field as field_of
from mlxcel_nb.scheduling.sequence import HandTo
from mlxcel_nb.scheduling.sequence import Sequence as Running


@dataclass(eq=False)
class Fetch:
    """One sequence's.

    Args:
        id: of the request to its reader.
        reader: the instance that reads it.
        asked_s, heard_s: when it was asked for, and when it was heard of last.
        first_s, landed_s: when the token came that follows, and when all else had.
        here: members that have all they need.
        account: what sending it took.
    """

    id: str
    reader: str
    sequence: Running
    transfer: int
    asked_s: float
    heard_s: float
    first_s: float | None = None
    landed_s: float | None = None
    here: set[str] = field(default_factory=set)
    account: Account | None = None
    reused: int = 0


class Fetches:
    """All of an instance's.

    Args:
        instance: its own name.
        ask: sends a message to the leader of a reader.
        members: how many have to have what was sent.
        patience_s: a reader that is not heard of for so long is given up.
    """

    def __init__(
        self, instance: str, ask: Callable[[dict[str, Any]], None], *, members: int, patience_s: float
    ) -> None:
        self._instance = instance
        self._ask = ask
        self._members = members
        self._patience_s = patience_s
        self._by_id: dict[str, Fetch] = {}

    def begin(
        self, order: GenerateOrder, prompt: Sequence[int], sequence: Running, transfer: int, epoch: int, reader: str
    ) -> Fetch:
        """Ask `reader` to read a sequence and send it here."""
        self.drop(sequence)
        made = sequence.tokens[len(prompt) :]
        params = SamplingParams.from_dict({**order.params.to_dict(), "max_tokens": len(made) + 1})
        now = time.monotonic()
        # What its members note of one that is fed its tokens is asked for by its own id.
        name = order.id if order.forced is not None else f"{order.id}.{transfer}"
        fetch = Fetch(name, reader, sequence, transfer, now, now)
        wish = GenerateOrder(
            id=fetch.id, instance=reader, params=params, token_ids=list(prompt), made=made or None,
            forced=order.forced, caller=order.caller, hand=HandTo(self._instance, epoch, transfer, order.id),
        )  # fmt: skip
        self._by_id[fetch.id] = fetch
        self._ask(wish.to_dict())
        return fetch

    def of(self, request: str) -> Fetch | None:
        """The one with this id, if anybody waits for it still."""
        return self._by_id.get(request)

    def at(self, transfer: int) -> Fetch | None:
        return next((fetch for fetch in self._by_id.values() if fetch.transfer == transfer), None)

    def drop(self, sequence: Running) -> None:
        """Nobody waits for it any more: its reader is told."""
        for fetch in [each for each in self._by_id.values() if each.sequence is sequence]:
            del self._by_id[fetch.id]
            self._ask({"type": "cancel", "instance": fetch.reader, "id": fetch.id})

    def drop_all(self) -> None:
        for sequence in [fetch.sequence for fetch in self._by_id.values()]:
            self.drop(sequence)

    def over(self, fetch: Fetch) -> None:
        """It has what it needs, and its reader has said its last word."""
        self._by_id.pop(fetch.id, None)

    def landed(self, fetch: Fetch, node_id: str) -> bool:
        """A member has all it needs; whether it was the last."""
        fetch.here.add(node_id)
        if len(fetch.here) < self._members or fetch.landed_s is not None:
            return False
        fetch.landed_s = time.monotonic()
        return True

    def late(self, now: float) -> list[Fetch]:
        """Those whose reader has not been heard of for too long."""
        return [f for f in self._by_id.values() if f.landed_s is None and now - f.heard_s > self._patience_s]

    def __bool__(self) -> bool:
        return bool(self._by_id)


def first_of(message: dict[str, Any]) -> Sampled:
    """The token in a `first` message.

    Raises:
        WireError: there is none.
    """
    (sampled,) = outcome_of(field_of(message, "sampled", dict)).values() or (None,)
    if not isinstance(sampled, Sampled):
        raise WireError("the first token of an answer cannot be read")
    return sampled
