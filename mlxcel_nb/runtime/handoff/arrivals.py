"""What comes of sequences that other instances have read, on a member that is to go on with them.

The plan says what is expected; the links bring it, each on its own thread, in any order. Of what is here the MLX thread
makes a few arrays before each step, so that no step waits for all of them. When all of a transfer is here and agrees,
the member says so, and a later plan makes a sequence of it. What nobody expects waits a moment for a plan that is on
its way, and is then refused. What is expected is given up when the plan drops it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxcel_nb.errors import WireError
from mlxcel_nb.models.cache_parts import Whole, put_together, restored
from mlxcel_nb.plan.recutting import Holdings, Want, wants
from mlxcel_nb.util.chunks import Chunks
from mlxcel_nb.util.log import get_logger
from mlxcel_nb.wire import kv
from mlxcel_nb.wire.kv import KVType, Transfer, Why
from mlxcel_nb.wire.kv_assembler import Abandoned, ArrivedLayer, Complete, KVAssembler

log = get_logger("runtime.handoff")

AHEAD_S = 10.0
"""A transfer may come so long before the plan that expects it: the leader asks for it when it has told the plan, and a
member may be at the step before."""

PARTS = 64
"""What a member sends of a sequence is a transfer for each range of heads; those of one have numbers that follow."""


PREPARED_BYTES = 4 << 20
"""Of what has come, copied to arrays before a step: a millisecond or two; one cache at least."""


@dataclass
class Coming:
    """What is here of a transfer.

    Attributes:
        parts: by cache, from each sender that has brought its part of it.
        whole: caches of which all parts are here.
        made: those of which arrays have been made.
        brought: caches of transfers that have ended, by sender.
        complete: all have.
    """

    sequence: int
    length: int
    parts: dict[int, dict[str, ArrivedLayer]] = field(default_factory=dict)
    whole: dict[int, Whole] = field(default_factory=dict)
    made: dict[int, Any] = field(default_factory=dict)
    brought: dict[str, set[int]] = field(default_factory=dict)
    complete: bool = False

    @property
    def nbytes(self) -> int:
        """Of what is here as bytes."""
        waiting = [part.arrays for parts in self.parts.values() for part in parts.values()]
        waiting += [whole.arrays for whole in self.whole.values()]
        return sum(memory.nbytes for arrays in waiting for memory in arrays)


@dataclass(frozen=True)
class Sender:
    """One member of an instance that reads, at the other end of a link; `wanted` is what it is to send, by cache."""

    instance: str
    name: str
    assembler: KVAssembler
    wanted: dict[int, Want]
    chunks: Chunks
    filled: dict[int, set[int]] = field(default_factory=dict)
    """By transfer that is under way, the caches that are here."""


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
        chunks = Chunks()
        assembler = KVAssembler(
            model=self._model, layers=layers, limit=self._limit,
            place=lambda _transfer, _layer, _index, spec: chunks.take(spec.nbytes),
            filled=lambda transfer, cache, layer: self._filled(sender, transfer, cache, layer),
        )  # fmt: skip
        sender = Sender(instance, name, assembler, {want.cache: want for want in wanted}, chunks)
        return sender

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

    def prepare(self) -> None:
        """Make arrays of some of what is here, before they are asked for."""
        left = PREPARED_BYTES
        while left > 0:
            with self._changed:
                coming = next((each for each in self._coming.values() if each.whole), None)
                if coming is None:
                    return
                cache, whole = next(iter(coming.whole.items()))
            left -= sum(memory.nbytes for memory in whole.arrays)
            made = restored(whole)
            with self._changed:
                coming.made[cache] = made
                del coming.whole[cache]

    def take(self, transfer: int) -> dict[int, Any]:
        """The caches of `transfer` that this member keeps; None for those that hold no arrays.

        Raises:
            WireError: it is not complete.
        """
        with self._changed:
            coming = self._coming.pop(transfer, None)
        if coming is None or not coming.complete:
            raise WireError(f"transfer {transfer} is to become a sequence, and is not here")
        return coming.made | {cache: restored(whole) for cache, whole in coming.whole.items()}

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
            sender.filled.clear()
        if not expected:
            return sender.assembler.refuse(kv.transfer_of(header), Why.EPOCH, "nobody waits for it any more").message
        event = sender.assembler.add(payload)
        if event is None:
            return None
        if isinstance(event, Complete):
            return self._complete(sender, event)
        if isinstance(event, Abandoned):
            sender.filled.pop(event.transfer.number, None)
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

    def _filled(self, sender: Sender, transfer: Transfer, cache: int, layer: ArrivedLayer) -> None:
        """All that a sender has of a cache is here; if the others have brought theirs, the cache is put together."""
        if cache not in sender.wanted:
            raise WireError(f"cache {cache} has come, which this member did not ask for")
        sender.filled.setdefault(transfer.number, set()).add(cache)
        with self._changed:
            coming = self._wanted(transfer)
            if coming is None:
                return
            came = coming.parts.setdefault(cache, {})
            came[sender.name] = layer
            givers = [each for each in self._senders[sender.instance].values() if cache in each.wanted]
            if any(each.name not in came for each in givers):
                return
            del coming.parts[cache]
        share = self._own[cache]
        assert share is not None
        whole = put_together(share, [(each.wanted[cache], came[each.name]) for each in givers])
        with self._changed:
            coming.whole[cache] = whole

    def _complete(self, sender: Sender, event: Complete) -> bytes:
        """All that one sender calls a transfer is here; it may send several, of different heads."""
        brought = sender.filled.pop(event.transfer.number, set())
        sender.chunks.let_go()
        with self._changed:
            coming = self._wanted(event.transfer)
            if coming is None:
                return kv.encode_refuse(event.transfer, Why.GIVEN_UP, "nobody waits for it any more")
            coming.brought.setdefault(sender.name, set()).update(brought)
            senders = self._senders[sender.instance].values()
            if any(coming.brought.get(each.name, set()) != each.wanted.keys() for each in senders if each.wanted):
                return event.ack
            coming.complete = True
        self._landed(event.transfer.epoch, event.transfer.number // PARTS)
        return event.ack

    def _wanted(self, transfer: Transfer) -> Coming | None:
        """What is here of what a transfer is a part of; None where nobody waits for it any more."""
        coming = self._coming.get(transfer.number // PARTS) if transfer.epoch == self._epoch else None
        if coming is not None and transfer.tokens != (0, coming.length):
            raise WireError(f"a transfer of tokens {tuple(transfer.tokens)}, {coming.length} are due")
        return coming
