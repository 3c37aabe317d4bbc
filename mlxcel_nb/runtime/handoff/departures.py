"""What is read of sequences here and goes to an instance that is to go on with them, on a member that reads.

Keys and values go as soon as they have been made: of each chunk of a prompt layer after layer, while the next is
computed; states and windows when the last chunk is through. The MLX thread copies what goes and hands it to the links,
whose threads encode, seal and send it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxcel_nb.errors import MlxcelError, PeerLost, WireError
from mlxcel_nb.models.arrays import copied
from mlxcel_nb.models.cache_parts import cut_out
from mlxcel_nb.models.cache_state import TOKEN_AXIS, LayerState, describe
from mlxcel_nb.models.caches import every
from mlxcel_nb.net.bulk.bulk_link import BulkLink
from mlxcel_nb.plan.recutting import Holdings, Want
from mlxcel_nb.runtime.handoff.account import Account
from mlxcel_nb.runtime.handoff.arrivals import PARTS
from mlxcel_nb.scheduling.step_plan import Hand
from mlxcel_nb.util.chunks import Chunks
from mlxcel_nb.wire.kv import BY_TOKEN, ArraySpec, Layout, Range, Transfer, Why
from mlxcel_nb.wire.kv_sender import KVSender

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


@dataclass
class Target:
    """One member of an instance that goes on, and what it wants."""

    name: str
    link: BulkLink
    wants: tuple[Want, ...]


class _Stream:
    """What one target is sent of a transfer that has one range of heads; a link's thread makes its messages."""

    def __init__(self, target: Target, wants: Sequence[Want], transfer: Transfer, nbytes: int, encoding: str) -> None:
        self.target = target
        self.wants = {want.cache: want for want in wants}
        self.sender = KVSender(transfer, sorted(self.wants), nbytes, encoding=encoding)
        self.described: set[int] = set()
        self.sent = 0

    def frames(
        self, made: Iterator[list[ReadableBuffer]] | Sequence[list[ReadableBuffer]]
    ) -> Iterator[list[ReadableBuffer]]:
        """`made`, counted."""
        for parts in made:
            self.sent += sum(memoryview(part).nbytes for part in parts)
            yield parts

    def begin(self) -> None:
        self.target.link.send(self.frames([[self.sender.begin()]]))

    def layer(
        self, cache: int, state: LayerState, specs: Sequence[ArraySpec], arrays: Sequence[tuple[memoryview, int]]
    ) -> None:
        """Send arrays of one cache, each from a slot on."""
        new = cache not in self.described
        self.described.add(cache)

        def made() -> Iterator[list[ReadableBuffer]]:
            if new:
                yield [self.sender.layer(cache, state.layout, state.dtype, specs, state.scalars)]
            for number, (data, begin) in enumerate(arrays):
                if data.nbytes:
                    yield from self.sender.pieces(cache, number, data, begin=begin)

        self.target.link.send(self.frames(made()))

    def end(self) -> None:
        def made() -> Iterator[list[ReadableBuffer]]:
            yield [self.sender.end()]

        self.target.link.send(self.frames(made()))

    def abandon(self, why: str) -> None:
        self.target.link.send([[self.sender.abandon(Why.GIVEN_UP, why)]])


class Departure:
    """One sequence on its way."""

    def __init__(self, hand: Hand, streams: Sequence[_Stream], own: Holdings, encoding: str) -> None:
        self.hand = hand
        self._chunks = Chunks()
        self._read, self._before = time.monotonic(), 0
        self._own = own
        self._encoding = encoding
        self._streams = streams
        self._gone: dict[int, int] = {}
        self._at = 0
        self.over = False
        for stream in streams:
            stream.begin()

    def reads(self, caches: list[Any], count: int) -> int:
        """So many tokens are about to be read; how many have been after them."""
        return count + max((int(x.offset) for x in every(caches) if hasattr(x, "offset")), default=0)

    def on_layer(self, caches: list[Any], until: int) -> None:
        """Send what has come to the caches, from the first layer on; `until` tokens are in those that have it all."""
        leaves = list(every(caches))
        while self._at < len(leaves) and self._reached(self._at, leaves[self._at], until):
            self._send_tokens(self._at, leaves[self._at])
            self._at += 1

    def _reached(self, number: int, cache: Any, until: int) -> bool:
        if self._own[number] is None or not hasattr(cache, "offset"):
            return True
        return int(cache.offset) >= until

    def chunk_done(self, caches: list[Any]) -> None:
        """A chunk has been computed."""
        for number, cache in enumerate(every(caches)):
            self._send_tokens(number, cache)
        self._at = 0

    def finish(self, caches: list[Any]) -> None:
        """All is read."""
        self._read = time.monotonic()
        self._before = sum(stream.sent for stream in self._streams)
        for number, cache in enumerate(every(caches)):
            self._send_tokens(number, cache)
            self._send_whole(number, cache)
        for stream in self._streams:
            stream.end()
        self.over = True

    def _send_tokens(self, number: int, cache: Any) -> None:
        """What has come to a cache that has a slot for each token."""
        if self._own[number] is None or not self._streams:
            return
        begin = self._gone.get(number, 0)
        state = describe(cache, begin=begin)
        if state.layout not in BY_TOKEN or not state.arrays or not (count := state.arrays[0].shape[TOKEN_AXIS]):
            return
        self._gone[number] = begin + count
        self._send(number, state, begin)

    def _send_whole(self, number: int, cache: Any) -> None:
        if self._own[number] is not None and number not in self._gone:
            self._send(number, describe(cache), 0)

    def _send(self, number: int, state: LayerState, begin: int) -> None:
        share = self._own[number]
        assert share is not None
        for stream in self._streams:
            if (want := stream.wants.get(number)) is None:
                continue
            parts = cut_out(state, share, want)
            specs = [self._spec(state, spec, tuple(x.shape)) for spec, x in zip(state.specs, parts, strict=True)]
            stream.layer(number, state, specs, [(copied(x, self._chunks.take), begin) for x in parts])

    def _spec(self, state: LayerState, spec: ArraySpec, dims: tuple[int, ...]) -> ArraySpec:
        """An array as the receiver will have it: of caches with a slot for each token all of these."""
        if state.layout in BY_TOKEN:
            dims = (*dims[:TOKEN_AXIS], self.hand.length, *dims[TOKEN_AXIS + 1 :])
        return ArraySpec(spec.dtype, spec.axis, dims)

    def heard(self, target: str, payload: memoryview) -> bool:
        """Take an answer; whether it is about this sequence.

        Raises:
            WireError: it does not fit what was sent.
        """
        return any(s.target.name == target and s.sender.heard(payload) for s in self._streams)

    @property
    def refused(self) -> str:
        """Why somebody does not take it; "" where all do."""
        return next((f"{s.target.name}: {s.sender.refused[1]}" for s in self._streams if s.sender.refused), "")

    @property
    def acknowledged(self) -> bool:
        return all(stream.sender.acknowledged for stream in self._streams)

    def accounted(self) -> Account:
        errors, now = [each.relative_max for s in self._streams for each in s.sender.errors], time.monotonic()
        return Account(
            nbytes=sum(s.sender.sent.nbytes for s in self._streams), sent=sum(s.sent for s in self._streams),
            before=self._before, after_s=now - self._read, error=max(errors, default=0.0),
            encoding=self._encoding,
        )  # fmt: skip

    def abandon(self, why: str) -> None:
        for stream in self._streams:
            if not stream.sender.acknowledged and stream.sender.refused is None:
                stream.abandon(why)


class Departures:
    """All sequences that a member reads for others.

    Args:
        own: what it keeps of each cache.
        model: SHA-256 of the model.
        heads: kv-heads of the model, as messages name all of them.
        states: caches that have no heads.
        room: bytes of caches of so many tokens.
        over: told of a transfer that has been taken, with its account, or was not, and why; on a link's thread.
    """

    def __init__(
        self,
        own: Holdings,
        model: bytes,
        *,
        heads: int,
        states: Collection[int] = (),
        room: Callable[[int], int],
        encoding: str,
        over: Callable[[Hand, Account | MlxcelError], None],
    ) -> None:
        self._own = own
        self._model = model
        self._heads = heads
        self._states = states
        self._room = room
        self._encoding = encoding
        self._over = over
        self._targets: dict[str, list[Target]] = {}
        self._under_way: dict[int, Departure] = {}
        self._waiting: dict[tuple[str, int], Departure] = {}
        self._lock = threading.Lock()

    def meet(self, instance: str, targets: Sequence[Target]) -> None:
        """Take note of the members of an instance, and what they want."""
        self._targets[instance] = list(targets)

    def begin(self, hand: Hand) -> None:
        """A sequence begins that goes to another instance.

        Raises:
            WireError: to one that is not known.
        """
        if hand.to not in self._targets:
            raise WireError("keys and values are to go to an instance that this member does not know")
        streams = []
        for target in self._targets[hand.to]:
            for part, (heads, wanted) in enumerate(self._by_heads(target.wants).items()):
                transfer = Transfer(
                    request=hand.request, model=self._model, epoch=hand.epoch, number=hand.transfer * PARTS + part,
                    heads=heads, tokens=Range(0, hand.length), layout=Layout.MIXED, dtype=None,
                )  # fmt: skip
                streams.append(_Stream(target, wanted, transfer, self._room(hand.length), self._encoding))
        departure = self._under_way[hand.sequence] = Departure(hand, streams, self._own, self._encoding)
        with self._lock:
            self._waiting[hand.to, hand.transfer] = departure
        if cut := next((target for target in self._targets[hand.to] if target.link.broken), None):
            self._end(departure, PeerLost("the link for caches is cut", node=cut.name))

    def abandon(self) -> None:
        """All sequences that are being read are gone."""
        for sequence in list(self._under_way):
            self.drop(sequence)

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def of(self, sequence: int) -> Departure | None:
        return self._under_way.get(sequence)

    def finish(self, sequence: int, caches: list[Any]) -> None:
        """All of a sequence has been read; with nothing to send it is over at once."""
        if (departure := self._under_way.pop(sequence, None)) is not None:
            departure.finish(caches)
            self._settle(departure)

    def drop(self, sequence: int) -> None:
        """A sequence goes; if it has not been read to its end, what has been sent of it is void."""
        if (departure := self._under_way.pop(sequence, None)) is not None:
            with self._lock:
                self._waiting.pop((departure.hand.to, departure.hand.transfer), None)
            departure.abandon("it is not read to its end")

    # -- the links', each on its thread

    def frame(self, target: str, payload: memoryview) -> None:
        """Take an answer to what was sent."""
        with self._lock:
            waiting = list(self._waiting.values())
        for departure in waiting:
            if departure.heard(target, payload):
                self._settle(departure)
                return

    def lost(self, target: str, error: MlxcelError) -> None:
        """A link has ended."""
        with self._lock:
            hit = [
                each for each in self._waiting.values() if any(t.name == target for t in self._targets[each.hand.to])
            ]
        for departure in hit:
            self._end(departure, error)

    def _settle(self, departure: Departure) -> None:
        if departure.refused:
            self._end(departure, WireError(f"what was read is not taken: {departure.refused}"))
        elif departure.over and departure.acknowledged:
            self._end(departure, departure.accounted())

    def _end(self, departure: Departure, how: Account | MlxcelError) -> None:
        hand = departure.hand
        with self._lock:
            if self._waiting.get((hand.to, hand.transfer)) is not departure:
                return
            del self._waiting[hand.to, hand.transfer]
        self._over(hand, how)

    def _by_heads(self, wants: Sequence[Want]) -> Mapping[Range, list[Want]]:
        """Caches by the range of kv-heads that is wanted of them: each is a transfer of its own, which names it.

        What has no heads goes with those of which all are wanted, or with the first.
        """
        found: dict[Range, list[Want]] = {}
        loose = []
        for want in wants:
            cut = want.cuts[0]
            if want.cache in self._states:
                loose.append(want)
                continue
            span = Range(0, self._heads) if cut is None else Range(cut.ranges[0][0], cut.ranges[-1][1])
            found.setdefault(span, []).append(want)
        if loose:
            whole = Range(0, self._heads)
            found.setdefault(whole if whole in found or not found else next(iter(found)), []).extend(loose)
        if len(found) > PARTS:
            raise WireError(f"keys and values of {len(found)} ranges of heads; {PARTS} can be told apart")
        return found
