"""Reads prompts for other instances: the leader's part. On the MLX thread.

Such a request ends when every member's part of its keys and values has been taken; the token that follows the prompt is
told before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxcel_nb.errors import WireError
from mlxcel_nb.models.sampling import Sampled
from mlxcel_nb.runtime.handoff.account import Account, together
from mlxcel_nb.runtime.outcomes import told

if TYPE_CHECKING:
    from mlxcel_nb.runtime.active import Active
    from mlxcel_nb.runtime.commands import Sent
    from mlxcel_nb.runtime.engine import Engine
    from mlxcel_nb.runtime.instance import Instance
    from mlxcel_nb.runtime.worker import Worker


NEWS_S = 5.0
"""Between two words on a request that waits."""


@dataclass
class Progress:
    """How far a request is: whether its token has been told, and what its members have accounted for."""

    told: bool = False
    accounts: dict[str, Account] = field(default_factory=dict)


class Handing:
    """Of one engine."""

    def __init__(self, engine: Engine, worker: Worker, instance: Instance) -> None:
        self._engine = engine
        self._worker = worker
        self._instance = instance
        self._members = instance.layout.size if instance.layout.ep == 1 else 1
        self._under_way: dict[tuple[str, int], tuple[Active, Progress]] = {}
        self._next_news = 0.0

    def add(self, active: Active) -> None:
        """A request whose keys and values go elsewhere.

        Raises:
            WireError: to an instance that is not known.
        """
        hand, handoff = active.command.order.hand, self._instance.handoff
        assert hand is not None
        if handoff is None or hand.to not in {peer.instance for peer in handoff.order.serves}:
            raise WireError("a prompt is to be read for an instance that this one does not work for")
        self._under_way[hand.to, hand.transfer] = (active, Progress())

    def look(self, now: float) -> None:
        """Have those who wait for their turn heard of now and then, by whoever waits for them."""
        if now < self._next_news:
            return
        self._next_news = now + NEWS_S
        for active, progress in self._under_way.values():
            if not progress.told:
                sequence = active.sequence
                read, total = (sequence.cached, len(sequence.tokens)) if sequence is not None else (0, 1)
                news = {"type": "prefill", "id": active.command.order.id, "done": read, "total": total}
                self._worker.outbox.stream(news)

    def first(self, active: Active, sampled: Sampled) -> None:
        """The token that follows the prompt."""
        hand, sequence = active.command.order.hand, active.sequence
        assert hand is not None and sequence is not None
        (_, progress) = self._under_way[hand.to, hand.transfer]
        progress.told = True
        self._worker.outbox.stream(
            {
                "type": "first",
                "id": active.command.order.id,
                "sampled": told(0, 0, {0: sampled}),
                "reused": sequence.reused,
            }
        )
        self._settle(active, progress)

    def sent(self, command: Sent) -> None:
        """A member's part has been taken, or has not."""
        found = self._under_way.get((command.to, command.transfer))
        if found is None:
            return
        active, progress = found
        if command.error is not None:
            self._engine.give_up(active, "error", command.error)
        elif command.account is not None:
            progress.accounts[command.node_id] = command.account
            self._settle(active, progress)

    def over(self, active: Active) -> None:
        """A request has ended, however it did."""
        if (hand := active.command.order.hand) is not None:
            self._under_way.pop((hand.to, hand.transfer), None)

    def _settle(self, active: Active, progress: Progress) -> None:
        if progress.told and len(progress.accounts) == self._members:
            self._engine.end(active, "length", handed=together(list(progress.accounts.values())).to_list())
