"""Saving and loading keys and values, the leader's side: which blocks a request left, and blocks that come.

Blocks that a router is fetching are held, so that they are not evicted under its hands, until it is done, asks for
nothing for a while, leaves, or nothing else can run for lack of room. On the MLX thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from mlxcel_nb.errors import ClusterError, RequestError
from mlxcel_nb.models.kv_layout import shares
from mlxcel_nb.models.part import LoadedPart
from mlxcel_nb.runtime.kv_store import LATER, Reply, number, pack_ids, unpack_ids
from mlxcel_nb.runtime.protocol import field
from mlxcel_nb.scheduling.adoption import Adoption
from mlxcel_nb.scheduling.scheduler import Scheduler
from mlxcel_nb.scheduling.sequence import Sequence, State
from mlxcel_nb.scheduling.step_plan import BLOCK, StepPlan

REMEMBERED = 16
"""Requests that are over, whose tokens are remembered."""

NO_STEP = -1
"""Nothing is to be run first."""

LEASE_S = 30.0
"""Blocks are held so long after a router has last asked for one."""


@dataclass
class Lease:
    """Blocks that are held for a router."""

    owner: str
    held: ExitStack
    until: float


class Kept:
    """What routers may save of a loaded model, and what they bring."""

    def __init__(self, scheduler: Scheduler, part: LoadedPart) -> None:
        self._scheduler = scheduler
        self._part = part
        self._over: OrderedDict[str, tuple[str, Sequence]] = OrderedDict()
        self._leases: dict[int, Lease] = {}
        self._coming: list[tuple[Adoption, Reply]] = []

    def ended(self, request: str, owner: str, sequence: Sequence) -> None:
        """A request is over."""
        self._over[request] = (owner, sequence)
        if len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    def answer(self, what: str, message: dict[str, Any], owner: str, reply: Reply, epoch: int) -> Any:
        """To `find`, `known` or `adopt`; `epoch` is the one that blocks are of now."""
        shares(self._part)  # or say why nothing is kept
        if what == "find":
            return self._find(field(message, "request", str), number(message, "transfer"), owner, epoch)
        tokens = unpack_ids(field(message, "tokens", bytes))
        if max(tokens, default=0) >= self._part.vocab_size:
            raise RequestError(f"token id {max(tokens)} is outside the model's vocabulary of {self._part.vocab_size}")
        if what == "known":
            home = self._scheduler.knows_best(tokens)
            blocks, held = self._scheduler.hold(tokens, home)
            held.close()
            return {"home": home, "kept": len(blocks)}
        home, begin = number(message, "home", self._scheduler.limits.homes - 1), number(message, "begin")
        adoption = Adoption(number(message, "transfer"), tokens[: len(tokens) // BLOCK * BLOCK], begin, home)
        self._scheduler.adopt(adoption)
        self._coming.append((adoption, reply))
        return LATER

    def _find(self, request: str, transfer: int, owner: str, epoch: int) -> dict[str, Any] | None:
        asked, sequence = self._over.get(request, (None, None))
        if sequence is None or asked != owner:
            raise RequestError("its tokens are not remembered any more", advice="Give the prompt that is to be saved.")
        if sequence.state is not State.ENDED:  # its blocks are kept with the next plan
            return None
        blocks, held = self._scheduler.hold(sequence.tokens, sequence.home)
        if not blocks:
            held.close()
            if (length := len(sequence.tokens)) <= BLOCK:
                raise RequestError(f"it has {length} tokens, and {BLOCK} is the least that is kept")
            raise RequestError("nothing is kept of it any more", advice="Give its prompt.")
        self.release(owner, transfer)
        self._leases[transfer] = Lease(owner, held, time.monotonic() + LEASE_S)
        tokens = pack_ids(sequence.tokens[: len(blocks) * BLOCK])
        return {"tokens": tokens, "blocks": blocks, "home": sequence.home, "epoch": epoch}

    def touch(self, owner: str, transfer: int) -> bool:
        """A router goes on fetching.

        Raises:
            ClusterError: what it fetches is not held any more.
        """
        lease = self._leases.get(transfer)
        if lease is None or lease.owner != owner:
            raise ClusterError("what was kept had to make room, or a step has failed", advice="Try again.")
        lease.until = time.monotonic() + LEASE_S
        return True

    def release(self, owner: str, transfer: int | None = None) -> None:
        """A router is done with a transfer, or with all."""
        for each in [n for n, lease in self._leases.items() if lease.owner == owner and transfer in (None, n)]:
            self._leases.pop(each).held.close()

    def settle(self, now: float, plan: StepPlan | None, epoch: int, *, stuck: bool) -> None:
        """After each plan: answer whose blocks are kept by it, and let go what is held for too long.

        Args:
            plan: that was made, and told to all members.
            stuck: there is something to run, and no room for it.
        """
        self._tell(plan.step if plan is not None else NO_STEP, epoch)
        for each in [n for n, lease in self._leases.items() if stuck or lease.until < now]:
            self._leases.pop(each).held.close()

    def forget(self) -> None:
        """The epoch is over, and all blocks are gone."""
        for adoption, _ in self._coming:
            adoption.kept = 0
        self._tell(NO_STEP, 0)
        self._leases.clear()

    def _tell(self, step: int, epoch: int) -> None:
        """Members have kept the blocks once they have run `step`."""
        for adoption, reply in [each for each in self._coming if each[0].kept is not None]:
            told = {"kept": adoption.kept, "home": adoption.home, "epoch": epoch, "step": step}
            reply({"type": "reply", "kv": told})
        self._coming = [each for each in self._coming if each[0].kept is None]
