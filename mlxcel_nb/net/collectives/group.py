"""Collectives among ranks that all have a hot link to each other, and tensors from one to another.

Owned by the thread that computes, as its hot links are. Every rank calls the same collectives with the same tags in the
same order. A collective that fails fails on every rank, with an error that names the one that failed: whoever
notices first tells the others, and those who only ran out of time ask each other whom they wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxcel_nb.errors import MlxcelError, WireError
from mlxcel_nb.net.collectives import exchange, inquest
from mlxcel_nb.net.collectives.exchange import Leg
from mlxcel_nb.net.collectives.summing import FLOATS, Array, narrow, sum_into, widen
from mlxcel_nb.net.collectives.ways import Way, blocks, choose
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.hot.inbox import Tensor
from mlxcel_nb.net.hot.interrupt import Interrupt
from mlxcel_nb.net.hot.moulds import SHORT_BYTES, Moulds, Shape, keep
from mlxcel_nb.net.hot.spin import Spin
from mlxcel_nb.net.hot.tag import Tag
from mlxcel_nb.net.hot.waiting import Patience
from mlxcel_nb.wire import tensors
from mlxcel_nb.wire.frames import HEAD_BYTES, bytes_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["Group", "Tag", "recv_from", "send_to"]

_DIRECT = Way.DIRECT

Given = tuple[Moulds | None, bytes, dict[int, Leg]]
"""Half of a swap: what was laid out and its head, if it is small, and legs that have to be gone the long way."""

_TYPES = {np.dtype(np.float32): "float32", np.dtype(np.float16): "float16"}


class Group:
    """The ranks that exchange partial results.

    Args:
        rank: this member's rank, which is not a key of `links`.
        links: hot links by rank of the peer.
        interrupt: breaks every wait.
        way: how to sum, whatever `choose` says: for measurements; the same on every rank.

    Every collective takes a `tag`, the same on every rank, and a `deadline`: a `time.monotonic()` value, which moves
    along while bytes move; 30 s from now by default. Views that are returned are valid until the next call.

    Raises (every collective, on every rank, naming the same node):
        PeerLost: a rank's connection ended.
        StepTimeout: a rank made no progress.
        PeerAborted: a rank left the step for a reason of its own.
        WireError: a rank sent something else than this collective.

    After any of these the ranks that remain go on in a later epoch.
    """

    def __init__(
        self, rank: int, links: Mapping[int, HotLink], interrupt: Interrupt | None = None, *, way: Way | None = None
    ) -> None:
        self.rank = rank
        self.size = len(links) + 1
        if sorted([rank, *links]) != list(range(self.size)):
            raise ValueError(f"ranks {sorted([rank, *links])} are not 0 to {self.size - 1}")
        self._links = dict(sorted(links.items()))
        self._peers = list(self._links.items())
        self._interrupt = interrupt
        self._way = way
        self._spin = Spin(min((link.spin.most_s for link in links.values()), default=0.0))
        self._shapes: dict[tuple[str, tuple[int, ...]], Shape] = {}

    # -- collectives ------------------------------------------------------------------------------

    def all_gather(self, tag: Tag, buffer: ReadableBuffer, *, deadline: float | None = None) -> list[memoryview]:
        """Every rank's buffer, of any size, in rank order; this rank's own included."""
        own = bytes_of(buffer)
        try:
            shape = self._shapes.get(("uint8", (len(own),))) or self._shape("uint8", (len(own),), len(own))
            gathered: list[memoryview] = self._swap(tag, shape, own, own, deadline)
        except (MlxcelError, exchange.Left) as error:
            raise self._failed(tag, error) from None
        return gathered

    def all_to_all(
        self, tag: Tag, buffers: Sequence[ReadableBuffer], *, deadline: float | None = None
    ) -> list[memoryview]:
        """What every rank has for this one, in rank order; `buffers` is what this one has for each, of any size."""
        mine = [bytes_of(buffer) for buffer in buffers]
        try:
            legs = {rank: self._leg_of_bytes(link, tag, mine[rank]) for rank, link in self._peers}
            got = self._run(tag, legs, Patience(deadline))
            for rank, tensor in got.items():
                self._check(rank, tensor, "uint8", tensor.dims)
        except (MlxcelError, exchange.Left) as error:
            raise self._failed(tag, error) from None
        return [mine[rank] if rank == self.rank else got[rank].data for rank in range(self.size)]

    def barrier(self, tag: Tag, *, deadline: float | None = None) -> None:
        """Return when every rank has called this."""
        self.all_gather(tag, b"", deadline=deadline)

    def all_reduce(
        self, tag: Tag, x: Array, *, dtype: str | None = None, out: Array | None = None, deadline: float | None = None
    ) -> Array:
        """The sum of every rank's `x`, the same bits on every rank.

        Args:
            x: C-contiguous, of one shape on every rank.
            dtype: "float32", "float16" or "bfloat16" (whose bits `x` and the sum hold as uint16); `x`'s own by default.
            out: where the sum goes: C-contiguous, `x`'s shape and type, or `x` itself; new memory by default.
        """
        dtype = dtype or _TYPES.get(x.dtype) or _unsummable(x)
        if out is None:
            out = np.empty_like(x)
        own = bytes_of(x)
        shape = self._shapes.get((dtype, x.shape)) or self._shape(dtype, x.shape, len(own))
        try:
            if shape.way is _DIRECT:
                sum_into(out, self._swap(tag, shape, own, x, deadline), dtype)
            else:
                if not out.flags.c_contiguous:  # its flat form would be a copy, which nobody looks at
                    raise ValueError("a sum cannot be put into an array that is not C-contiguous")
                flat = x.reshape(-1)
                total = flat if out is x else out.reshape(-1)
                sum_up = self._halves if shape.way is Way.HALVES else self._ring
                sum_up(tag, dtype, flat, total, Patience(deadline))
        except (MlxcelError, exchange.Left) as error:
            raise self._failed(tag, error) from None
        return out

    def begin_all_reduce(
        self, tag: Tag, x: Array, *, dtype: str | None = None, deadline: float | None = None
    ) -> Callable[[], None]:
        """Give `x` to the others; the sum has taken its place when what is returned has been called.

        That has to be the next call of this group, and what it raises is what `all_reduce` does. What is large, or has
        to be summed in parts, goes both ways then.
        """
        dtype = dtype or _TYPES.get(x.dtype) or _unsummable(x)
        own = bytes_of(x)
        shape = self._shapes.get((dtype, x.shape)) or self._shape(dtype, x.shape, len(own))
        small = shape.way is _DIRECT and shape.size <= SHORT_BYTES
        try:
            given = self._give(tag, shape, own) if small else None
        except (MlxcelError, exchange.Left) as error:
            raise self._failed(tag, error) from None

        def finish() -> None:
            if given is None:
                self.all_reduce(tag, x, dtype=dtype, out=x, deadline=deadline)
                return
            try:
                sum_into(x, self._take(tag, shape, given, x, deadline), dtype)
            except (MlxcelError, exchange.Left) as error:
                raise self._failed(tag, error) from None

        return finish

    def reduce_scatter(self, tag: Tag, x: Array, *, dtype: str | None = None, deadline: float | None = None) -> Array:
        """This rank's block (see `collectives.blocks`) of the sum of every rank's `x`, flat. Types as `all_reduce`."""
        dtype = dtype or _TYPES.get(x.dtype) or _unsummable(x)
        flat = x.reshape(-1)
        mine = flat[blocks(flat.size, self.size)[self.rank]]
        total = np.empty_like(mine)
        try:
            self._scatter(tag, dtype, flat, mine, total, Patience(deadline))
        except (MlxcelError, exchange.Left) as error:
            raise self._failed(tag, error) from None
        return total

    def broadcast(
        self, tag: Tag, root: int, buffer: ReadableBuffer | None = None, *, deadline: float | None = None
    ) -> memoryview:
        """The buffer of rank `root`, which alone gives one, on every rank."""
        waiting = Patience(deadline)
        try:
            if self.rank != root:
                legs = {root: Leg(self._links[root], sent=True)}
                return self._run(tag, legs, waiting)[root].data
            assert buffer is not None, "the root of a broadcast has the buffer"
            own = bytes_of(buffer)
            parts = tensors.encode("uint8", (len(own),), tag.name, own)
            self._run(tag, {rank: Leg(link, link.outgoing(parts), due=False) for rank, link in self._peers}, waiting)
            return own
        except (MlxcelError, exchange.Left) as error:
            raise self._failed(tag, error) from None

    # -- from one rank to another -----------------------------------------------------------------

    def send_to(
        self, rank: int, tag: Tag, dtype: str, dims: Sequence[int], buffer: ReadableBuffer, *,
        deadline: float | None = None,
    ) -> None:  # fmt: skip
        """Send a tensor to one rank.

        Returns when buffers hold what is left of it, 1 MB at most: ranks that all send more than that in a circle wait
        for each other.
        """
        send_to(self._links[rank], tag, dtype, dims, buffer, deadline=deadline, interrupt=self._interrupt)

    def recv_from(
        self, rank: int, tag: Tag, *, deadline: float | None = None
    ) -> tuple[str, tuple[int, ...], memoryview]:
        """Receive the tensor of `tag` from one rank."""
        return recv_from(self._links[rank], tag, deadline=deadline, interrupt=self._interrupt)

    # -- how they go ------------------------------------------------------------------------------

    def _swap(self, tag: Tag, shape: Shape, own: memoryview, mine: Any, deadline: float | None) -> list[Any]:
        """What each rank gives to every other, in rank order, as `shape` views it; `mine` in this rank's own place.

        A small tensor takes the short way: laid out once, sealed and sent to each peer, and the peer's polled for.
        Where all ranks send the same shape, the frame that is due from a peer differs from ours in its data alone, so
        nothing in it has to be parsed. Whatever is unusual (a full socket, no credit, a peer that is late) goes the
        long way.
        """
        return self._take(tag, shape, self._give(tag, shape, own), mine, deadline)

    def _give(self, tag: Tag, shape: Shape, own: memoryview) -> Given:
        """The first half of `_swap`: lay `own` out and send it, if it is small."""
        if self._interrupt is not None:
            self._interrupt.check()
        legs: dict[int, Leg] = {}
        if shape.size > SHORT_BYTES:
            for rank, link in self._peers:
                link.begin()
                legs[rank] = Leg(link, link.outgoing([shape.head(tag.encoded)[HEAD_BYTES:], own]))
            return None, b"", legs
        moulds = shape.lay_out(tag.encoded, own, self.size)
        head = moulds.out.head.tobytes()
        for rank, link in self._peers:
            link.begin()
            if not link.put(moulds.out):
                legs[rank] = Leg(link, link.outgoing([head[HEAD_BYTES:], own]))
        return moulds, head, legs

    def _take(self, tag: Tag, shape: Shape, given: Given, mine: Any, deadline: float | None) -> list[Any]:
        """The second half: what has come from every other."""
        moulds, head, legs = given
        gathered = [mine] * self.size
        if moulds is not None:
            for rank, link in self._peers:
                if rank in legs:
                    continue
                if not link.take(moulds.ins[rank], head, self._spin):
                    legs[rank] = Leg(link, sent=not link.wants_write)
                    continue
                gathered[rank] = moulds.views[rank]
                if link.wants_write and not link.pump_out(None):
                    legs[rank] = Leg(link, due=False)
        if legs:
            for rank, tensor in self._run(tag, legs, Patience(deadline), tag.name).items():
                self._check(rank, tensor, shape.dtype, shape.dims if shape.kind else tensor.dims)
                gathered[rank] = shape.view(tensor.data)
        return gathered

    def _scatter(self, tag: Tag, dtype: str, flat: Array, mine: Array, total: Array, waiting: Patience) -> None:
        """`total` = this rank's block of the sum; `mine` is its block of `flat`, and may be `total`."""
        cuts = blocks(flat.size, self.size)
        legs = {rank: self._leg(link, tag, dtype, flat[cuts[rank]]) for rank, link in self._peers}
        got = self._run(tag, legs, waiting)
        parts = [mine] * self.size
        for rank, tensor in got.items():
            parts[rank] = self._array(rank, tensor, dtype, mine)
        sum_into(total, parts, dtype)

    def _halves(self, tag: Tag, dtype: str, flat: Array, total: Array, waiting: Patience) -> None:
        cuts = blocks(flat.size, self.size)
        block = total[cuts[self.rank]]
        self._scatter(tag, dtype, flat, block if total is flat else flat[cuts[self.rank]], block, waiting)
        tag = tag.at(1)
        got = self._run(tag, {rank: self._leg(link, tag, dtype, block) for rank, link in self._peers}, waiting)
        for rank, tensor in got.items():
            block = total[cuts[rank]]
            np.copyto(block, self._array(rank, tensor, dtype, block))

    def _ring(self, tag: Tag, dtype: str, flat: Array, total: Array, waiting: Patience) -> None:
        """Partial sums travel as float32, so that each block is rounded once."""
        ranks, rank = self.size, self.rank
        cuts = blocks(flat.size, ranks)
        sums = widen(flat, dtype)
        for hop in range(ranks - 1):
            block = sums[cuts[(rank - hop - 1) % ranks]]
            partial = self._pass_on(tag.at(hop), "float32", sums[cuts[(rank - hop) % ranks]], block, waiting)
            np.add(partial, block, out=block)
        mine = cuts[(rank + 1) % ranks]
        total[mine] = narrow(sums[mine], dtype)
        for hop in range(ranks - 1):
            block = total[cuts[(rank - hop) % ranks]]
            tag_ = tag.at(ranks - 1 + hop)
            np.copyto(block, self._pass_on(tag_, dtype, total[cuts[(rank - hop + 1) % ranks]], block, waiting))

    def _pass_on(self, tag: Tag, dtype: str, block: Array, like: Array, waiting: Patience) -> Array:
        """Give `block` to the next rank; what the previous one gives, as much as `like`."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        legs = {after: self._leg(self._links[after], tag, dtype, block)}
        if before != after:
            legs[after].due = False
            legs[before] = Leg(self._links[before], sent=True)
        return self._array(before, self._run(tag, legs, waiting)[before], dtype, like)

    # -- pieces of the above ----------------------------------------------------------------------

    def _shape(self, dtype: str, dims: tuple[int, ...], size: int) -> Shape:
        return keep(self._shapes, Shape(dtype, dims, size, FLOATS.get(dtype), self._way or choose(self.size, size)))

    def _leg(self, link: HotLink, tag: Tag, dtype: str, block: Array) -> Leg:
        """`block` goes to a peer, and something comes back."""
        return Leg(link, link.outgoing(tensors.encode(dtype, block.shape, tag.name, block)))

    def _leg_of_bytes(self, link: HotLink, tag: Tag, data: memoryview) -> Leg:
        """`data` goes to a peer, and as much as it likes comes back."""
        return Leg(link, link.outgoing(tensors.encode("uint8", (len(data),), tag.name, data)))

    def _run(self, tag: Tag, legs: Mapping[int, Leg], waiting: Patience, name: str = "") -> dict[int, Tensor]:
        """Every leg to its end; what was due, by rank. Links that have not begun this call begin it."""
        if not name:
            name = tag.name
            for leg in legs.values():
                leg.link.begin()
        exchange.run(list(legs.values()), tag, name, list(self._links.values()), self._interrupt, waiting)
        for leg in legs.values():
            if leg.link.wants_write:
                leg.link.pump_out(None)
        return {rank: leg.got for rank, leg in legs.items() if leg.got is not None}

    def _array(self, rank: int, tensor: Tensor, dtype: str, like: Array) -> Array:
        self._check(rank, tensor, dtype, like.shape)
        return np.frombuffer(tensor.data, FLOATS[dtype])

    def _check(self, rank: int, tensor: Tensor, dtype: str, dims: tuple[int, ...]) -> None:
        if tensor.dtype != dtype or tensor.dims != dims:
            raise WireError(
                f"sent {tensor.dtype} {tensor.dims} for exchange {tensor.tag.name} where {dtype} {dims} is due",
                node=self._links[rank].node,
            )

    def _failed(self, tag: Tag, error: MlxcelError | exchange.Left) -> MlxcelError:
        return inquest.hold(tag, error, list(self._links.values()), self._interrupt)


def send_to(
    link: HotLink,
    tag: Tag,
    dtype: str,
    dims: Sequence[int],
    buffer: ReadableBuffer,
    *,
    deadline: float | None = None,
    interrupt: Interrupt | None = None,
) -> None:
    """Send a tensor, activations of any size, over `link`."""
    link.send_tensor(tag, dtype, dims, buffer, deadline=deadline, interrupt=interrupt)


def recv_from(
    link: HotLink,
    tag: Tag,
    *,
    into: memoryview | None = None,
    deadline: float | None = None,
    interrupt: Interrupt | None = None,
) -> tuple[str, tuple[int, ...], memoryview]:
    """Element type, shape and bytes of the tensor of `tag`; the bytes are valid until the next call on `link`.

    Args:
        into: where the bytes shall go, as many as are due: memory of the caller's, such as an MLX array's own.
    """
    tensor = link.recv_tensor(tag, into=into, deadline=deadline, interrupt=interrupt)
    return tensor.dtype, tensor.dims, tensor.data


def _unsummable(x: Array) -> str:
    raise ValueError(f"arrays of {x.dtype} cannot be summed; {', '.join(FLOATS)} can")
