"""What comes of sequences that other instances have read, on a member that is to go on with them.

The plan says what is expected; the links bring it, each on its own thread, in any order; when all of a transfer is here
and agrees, the member says so, and a later plan makes the caches of a sequence of it. What nobody expects waits a
moment for a plan that is on its way, and is then refused. What is expected is given up when the plan drops it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mlxcel_nb.errors import WireError
from mlxcel_nb.models.cache_parts import Whole, put_together
from mlxcel_nb.plan.recutting import Holdings, Want, wants
from mlxcel_nb.util.log import get_logger
from mlxcel_nb.wire import kv
from mlxcel_nb.wire.kv import ArraySpec, KVType, Transfer, Why
from mlxcel_nb.wire.kv_assembler import Abandoned, ArrivedLayer, Complete, KVAssembler

log = get_logger("runtime.handoff")

AHEAD_S = 10.0
"""A transfer may come so long before the plan that expects it: the leader asks for it when it has told the plan, and a
member may be at the step before."""

PARTS = 64
"""What a member sends of a sequence is a transfer for each range of heads; those of one have numbers that follow."""


@dataclass
class Coming:
    """What is here of a transfer: of each cache the parts that have come, by sender."""

    sequence: int
    length: int
    parts: dict[str, dict[int, ArrivedLayer]] = field(default_factory=dict)
    nbytes: int = 0
    whole: dict[int, Whole] | None = None


@dataclass(frozen=True)
class Sender:
    """One member of an instance that reads, at the other end of a link; `wanted` is what it is to send, by cache."""

    instance: str
    name: str
    assembler: KVAssembler
    wanted: dict[int, Want]


class Arrivals:
    """All that is on its way to a member.

    Args:
        own: what it keeps of each cache.
        model: SHA-256 of the model.
        limit: bytes that may be on their way from one sender at once.
        landed: told the epoch and number of a transfer that is complete; on the thread of a link.
    """

    def __init__(self, own: Holdings, model: bytes, *, limit: int, landed: Callable[[int, int], None]) -> None:
        self._own = own
        self._model = model
        self._limit = limit
        self._landed = landed
        self._epoch = 0
        self._coming: dict[int, Coming] = {}
        self._changed = threading.Condition()
        self._senders: dict[str, dict[str, Sender]] = {}
        self._closed = False

    # -- who sends

    def meet(self, instance: str, shares: Mapping[str, Holdings], turn: int) -> dict[str, tuple[Want, ...]]:
        """Take note of what the members of an instance keep; what each of them is to send.

        Raises:
            WireError: together they do not keep what is needed here.
        """
        found = wants(self._own, shares, turn=turn)
        with self._changed:
            self._senders[instance] = {name: self._sender(instance, name, wanted) for name, wanted in found.items()}
        return found

    def renew(self, instance: str, name: str) -> tuple[Want, ...]:
        """A member that has been met has a new link: what was on its way is not; what it is to send."""
        with self._changed:
            wanted = tuple(self._senders[instance][name].wanted.values())
            self._senders[instance][name] = self._sender(instance, name, wanted)
        return wanted

    def _sender(self, instance: str, name: str, wanted: Sequence[Want]) -> Sender:
        layers = range(len(self._own))
        assembler = KVAssembler(model=self._model, layers=layers, limit=self._limit, place=_memory)
        return Sender(instance, name, assembler, {want.cache: want for want in wanted})

    def sender(self, instance: str, name: str) -> Sender:
        """A member of an instance that has been met, for the link to it."""
        return self._senders[instance][name]

    # -- the plan's, on the MLX thread

    def expect(self, epoch: int, transfer: int, sequence: int, length: int) -> None:
        """Take what comes of `transfer` from now on."""
        with self._changed:
            if epoch > self._epoch:
                self._epoch = epoch
                self._coming.clear()
            self._forget(sequence)
            self._coming[transfer] = Coming(sequence, length)
            self._changed.notify_all()

    def take(self, transfer: int) -> dict[int, Whole]:
        """All that has come of `transfer`.

        Raises:
            WireError: it is not complete.
        """
        with self._changed:
            coming = self._coming.pop(transfer, None)
        if coming is None or coming.whole is None:
            raise WireError(f"transfer {transfer} is to become a sequence, and is not here")
        return coming.whole

    def drop(self, sequence: int) -> None:
        """What comes of a sequence is not wanted any more."""
        with self._changed:
            self._forget(sequence)

    def leave(self, epoch: int) -> None:
        """Nothing of `epoch` and those before it is wanted any more."""
        with self._changed:
            if self._epoch <= epoch:
                self._coming.clear()

    def close(self) -> None:
        """Nothing is wanted any more, and nobody waits here."""
        with self._changed:
            self._closed = True
            self._coming.clear()
            self._changed.notify_all()

    @property
    def nbytes(self) -> int:
        """Of what has come and is not part of a sequence yet."""
        with self._changed:
            return sum(coming.nbytes for coming in self._coming.values())

    def _forget(self, sequence: int) -> None:
        for number in [n for n, coming in self._coming.items() if coming.sequence == sequence]:
            del self._coming[number]

    # -- the links', each on its thread

    def frame(self, sender: Sender, payload: memoryview) -> bytes | None:
        """Take a kv frame; what is to be answered.

        Raises:
            WireError: it breaks the contract.
        """
        header, _ = kv.decode(payload)
        expected = header.type is not KVType.BEGIN or self._expected(header.epoch, header.number // PARTS)
        if header.epoch > sender.assembler.epoch:
            sender.assembler.advance(header.epoch)
        if not expected:
            return sender.assembler.refuse(kv.transfer_of(header), Why.EPOCH, "nobody waits for it any more").message
        event = sender.assembler.add(payload)
        if event is None:
            return None
        if isinstance(event, Complete):
            return self._complete(sender, event)
        if isinstance(event, Abandoned):
            log.info("transfer %d of %s was given up: %s", event.transfer.number, sender.name, event.detail)
            return None
        return event.message

    def _expected(self, epoch: int, number: int) -> bool:
        """Whether a transfer is expected, now or within a moment."""
        end = time.monotonic() + AHEAD_S
        with self._changed:
            while not self._closed:
                if epoch < self._epoch or (epoch == self._epoch and number in self._coming):
                    return epoch == self._epoch
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    return False
        return False

    def _complete(self, sender: Sender, event: Complete) -> bytes:
        """All that one sender calls a transfer is here; it may send several, of different heads."""
        number = event.transfer.number // PARTS
        with self._changed:
            coming = self._coming.get(number) if event.transfer.epoch == self._epoch else None
            if coming is None:
                return kv.encode_refuse(event.transfer, Why.GIVEN_UP, "nobody waits for it any more")
            if event.transfer.tokens != (0, coming.length):
                raise WireError(f"a transfer of tokens {tuple(event.transfer.tokens)}, {coming.length} are due")
            if odd := event.layers.keys() - sender.wanted.keys():
                raise WireError(f"cache {min(odd)} has come, which this member did not ask for")
            coming.parts.setdefault(sender.name, {}).update(event.layers)
            coming.nbytes += sum(memory.nbytes for layer in event.layers.values() for memory in layer.arrays)
            senders = self._senders[sender.instance].values()
            if any(coming.parts.get(each.name, {}).keys() != each.wanted.keys() for each in senders if each.wanted):
                return event.ack
        whole = self._put_together(coming, sender.instance)
        with self._changed:
            if self._coming.get(number) is not coming:
                return event.ack
            coming.whole, coming.parts = whole, {}
        self._landed(event.transfer.epoch, number)
        return event.ack

    def _put_together(self, coming: Coming, instance: str) -> dict[int, Whole]:
        found = {}
        for cache, share in enumerate(self._own):
            if share is not None:
                senders = [each for each in self._senders[instance].values() if cache in each.wanted]
                came = [(each.wanted[cache], coming.parts[each.name][cache]) for each in senders]
                found[cache] = put_together(share, came)
        return found


def _memory(_transfer: Transfer, _layer: int, _index: int, spec: ArraySpec) -> memoryview:
    """Where an array goes: the system gives what is written to."""
    return memoryview(np.empty(spec.nbytes, np.uint8))
