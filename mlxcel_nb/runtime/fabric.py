"""A member's hot links, by what they are for: partial sums, activations, step plans, tokens.

Owned by the MLX thread: every call here blocks that thread, always with a deadline, and a set `Interrupt`
breaks any of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_nb.cluster.layout import Layout
from mlxcel_nb.errors import WireError
from mlxcel_nb.net.collectives.group import Group, Tag, recv_from, send_to
from mlxcel_nb.net.hot.hot_link import HotLink, Interrupt
from mlxcel_nb.runtime.spans import Kind, Spans

_WIRE_NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}
_CARRIED = {**_WIRE_NAMES, mx.int32: "int32", mx.uint32: "uint32", mx.bool_: "bool"}
"""What goes from stage to stage. A few models send choices and masks along with the activations."""
_MLX_TYPES = {name: dtype for dtype, name in _CARRIED.items()}


def as_buffer(x: mx.array) -> np.ndarray:
    """`x`'s own memory, evaluated, uncopied where contiguous. bfloat16, which has no buffer format, shows as uint16."""
    return _evaluated(x)[1]


def sum_over(
    group: Group, tag: Tag, x: mx.array, *, deadline: float | None = None, spans: Spans | None = None
) -> mx.array:
    """The sum of every rank's `x`, which is given up: the sum takes its place in memory.

    Args:
        x: the result of an operation, held by nobody else; float32, float16 or bfloat16.
        spans: told how long the exchange took.
    """
    x, buffer = _evaluated(x)
    began = time.monotonic()
    group.all_reduce(tag, buffer, dtype=_WIRE_NAMES[x.dtype], out=buffer, deadline=deadline)
    if spans is not None:
        spans.note(Kind.TRANSFER, began)
    return x


def _evaluated(x: mx.array) -> tuple[mx.array, np.ndarray]:
    """`x`, or its contiguous copy, evaluated, and its memory; bfloat16 shows as uint16."""
    bits = x.view(mx.uint16) if x.dtype == mx.bfloat16 else x
    mx.eval(bits)
    buffer = np.asarray(bits)
    # A copy only where needed: one more operation costs as much as the evaluation of a small array.
    return (x, buffer) if buffer.flags.c_contiguous else _evaluated(mx.contiguous(x))


def from_buffer(data: memoryview, dtype: mx.Dtype, shape: tuple[int, ...]) -> mx.array:
    """The array whose bytes are `data` (copied)."""
    if dtype == mx.bfloat16:
        return mx.array(np.frombuffer(data, np.uint16).reshape(shape)).view(mx.bfloat16)
    return mx.array(np.frombuffer(data, _CARRIED[dtype]).reshape(shape))


class Fabric:
    """What one member of a layout uses to talk to the others.

    Args:
        links: member index -> hot link, for every edge this member is an end of.
        step_s: how long any single wait may last.
        spans: told how long each exchange of a step took.

    Attributes:
        ranks: rank -> hot link, of the other ranks of this stage.
        exchanges: collectives that this rank took part in since the model was loaded.
    """

    def __init__(
        self,
        layout: Layout,
        me: int,
        links: dict[int, HotLink],
        interrupt: Interrupt,
        step_s: float,
        spans: Spans | None = None,
    ) -> None:
        stage, rank = layout.stage_of(me), layout.rank_of(me)
        self.rank = rank
        self.links = links
        self.step_s = step_s
        self.spans = spans or Spans()
        self._interrupt = interrupt
        self._epoch, self._step, self._seq = 0, 0, 0
        self.exchanges = 0
        self._deferring = False
        self._unsettled: tuple[Callable[[], None], float] | None = None  # what ends it, and seconds that it has taken
        peers = {layout.rank_of(m): link for m, link in links.items() if layout.stage_of(m) == stage}
        self.ranks = peers
        self._group = Group(rank, peers, interrupt) if layout.width > 1 else None
        # Of a model that runs its layers several times over, the last stage hands back to the first.
        self._previous = links.get(layout.member((stage - 1) % layout.pp, rank))
        self._next = links.get(layout.member((stage + 1) % layout.pp, rank))
        self.leader = links.get(0)
        self.followers = links if me == 0 else {}

    def begin_step(self, epoch: int, step: int) -> None:
        """Name what follows, so that whatever an aborted epoch left in the sockets is told apart."""
        self._epoch, self._step, self._seq = epoch, step, 0

    def _deadline(self) -> float:
        return time.monotonic() + self.step_s

    def _collective(self) -> Tag:
        self._seq += 1
        self.exchanges += 1
        return Tag(self._epoch, self._step, self._seq)

    def _handover(self, which: int) -> Tag:
        """One of the tensors a step sends from stage to stage; the stages' own collectives count from 1."""
        return Tag(self._epoch, self._step, 0, which)

    def all_reduce(self, x: mx.array) -> mx.array:
        """Sum of `x`, which is given up, over the tensor ranks of this stage: the same bits on every rank."""
        if self._group is None:
            return x
        self.settle()
        if not self._deferring:
            return sum_over(self._group, self._collective(), x, deadline=self._deadline(), spans=self.spans)
        x, buffer = _evaluated(x)
        tag, began = self._collective(), time.monotonic()
        dtype = _WIRE_NAMES[x.dtype]
        end = self._group.begin_all_reduce(tag, buffer, dtype=dtype, deadline=self._deadline())
        self._unsettled = (end, time.monotonic() - began)
        return x

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Sums made within are begun, and ended when the next one is asked for, or at the end.

        Until then their arrays hold this rank's part, and whoever builds on them must not look: while they are on their
        way, the graph of what follows is built.
        """
        self._deferring = True
        try:
            yield
            self.settle()
        finally:
            self._deferring, self._unsettled = False, None

    def settle(self) -> None:
        """End the sum that is on its way, if there is one."""
        if self._unsettled is not None:
            (end, begun_s), self._unsettled = self._unsettled, None
            began = time.monotonic()
            end()
            self.spans.note(Kind.TRANSFER, began - begun_s)  # one interval for both halves

    def all_to_all(self, buffers: Sequence[bytes]) -> Sequence[memoryview | bytes]:
        """What each rank of this stage has for this one, which has `buffers` for them; valid until the next call."""
        if self._group is None:
            return buffers
        self.settle()
        began = time.monotonic()
        given = self._group.all_to_all(self._collective(), buffers, deadline=self._deadline())
        self.spans.note(Kind.TRANSFER, began)
        return given

    def gather_columns(self, x: mx.array, widths: Sequence[int]) -> mx.array:
        """Rank 0 gets every tensor rank's columns side by side; the others send theirs, and get nothing but the shape.

        Args:
            x: (..., widths[rank]), of one dtype on all ranks.

        Raises:
            WireError: a rank sent something else.
        """
        if self._group is None:
            return x
        self.settle()
        tag, shape = self._collective(), x.shape[:-1]
        if self.rank:
            buffer = memoryview(as_buffer(x)).cast("B")
            began = time.monotonic()
            send_to(
                self.ranks[0], tag, _CARRIED[x.dtype], x.shape, buffer,
                deadline=self._deadline(), interrupt=self._interrupt,
            )  # fmt: skip
            self.spans.note(Kind.TRANSFER, began)
            return mx.zeros((*shape, sum(widths)), x.dtype)
        mx.eval(x)  # while the others compute theirs
        columns = [x]
        for rank, link in sorted(self.ranks.items()):
            began = time.monotonic()
            dtype, told, data = recv_from(link, tag, deadline=self._deadline(), interrupt=self._interrupt)
            self.spans.note(Kind.TRANSFER, began)
            if (_MLX_TYPES.get(dtype), tuple(told)) != (x.dtype, (*shape, widths[rank])):
                raise WireError(f"{dtype} of shape {list(told)} where logits were due", node=link.node)
            columns.append(from_buffer(data, x.dtype, tuple(told)))
        return mx.concatenate(columns, axis=-1)

    def gather(self, data: bytes = b"", *, patience_s: float | None = None) -> list[bytes]:
        """What every tensor rank of this stage says, in rank order; with nothing to say it is a barrier.

        Args:
            patience_s: in place of the step's own time.
        """
        if self._group is None:
            return [data]
        self.settle()
        began = time.monotonic()
        deadline = began + (self.step_s if patience_s is None else patience_s)
        gathered = [bytes(each) for each in self._group.all_gather(self._collective(), data, deadline=deadline)]
        self.spans.note(Kind.TRANSFER, began)
        return gathered

    def tell_ranks(self, words: Mapping[int, bytes], interrupt: Interrupt) -> Tag:
        """Send each other rank of this stage its word; the tag is for `hear_ranks`. Only `interrupt` breaks it off."""
        tag = self._collective()
        for rank, word in words.items():
            send_to(
                self.ranks[rank], tag, "uint8", (len(word),), word, deadline=self._deadline(), interrupt=interrupt
            )  # fmt: skip
        return tag

    def hear_ranks(self, tag: Tag, interrupt: Interrupt) -> Iterator[tuple[int, bytes]]:
        """Each other rank and what it told this one, in rank order. Only `interrupt` breaks it off."""
        for rank, link in sorted(self.ranks.items()):
            yield rank, bytes(recv_from(link, tag, deadline=self._deadline(), interrupt=interrupt)[2])

    def send_hidden(self, arrays: Sequence[mx.array]) -> None:
        """Hand `arrays` to the same rank of the next stage, which knows their names by their order.

        What goes from one stage to the next in one step goes in order, so laps need no names of their own.
        """
        assert self._next is not None
        for which, x in enumerate(arrays):
            buffer = memoryview(as_buffer(x)).cast("B") if x.size else memoryview(b"")
            began = time.monotonic()
            send_to(
                self._next, self._handover(which), _CARRIED[x.dtype], x.shape, buffer,
                deadline=self._deadline(), interrupt=self._interrupt,
            )  # fmt: skip
            self.spans.note(Kind.SEND_HIDDEN, began)

    def recv_hidden(self, names: Sequence[str]) -> dict[str, mx.array]:
        """What the previous stage hands over, by the `names` it goes by here."""
        assert self._previous is not None
        received = {}
        for which, name in enumerate(names):
            began = time.monotonic()
            dtype, shape, data = recv_from(
                self._previous, self._handover(which), deadline=self._deadline(), interrupt=self._interrupt
            )
            self.spans.note(Kind.WAIT_HIDDEN, began)
            if dtype not in _MLX_TYPES:
                raise WireError(f"{name} of type {dtype} where activations were due")
            received[name] = from_buffer(data, _MLX_TYPES[dtype], tuple(shape))
        return received

    def tell(self, link: HotLink, message: dict[str, Any], *, patience_s: float | None = None) -> None:
        """One control message on a hot link; `patience_s` in place of the step's own time."""
        deadline = self._deadline() if patience_s is None else time.monotonic() + patience_s
        link.send_control(message, deadline=deadline, interrupt=self._interrupt)

    def tell_leader(self, message: dict[str, Any]) -> None:
        assert self.leader is not None
        self.tell(self.leader, message)

    def recv_tokens(self, sampler: int, epoch: int, step: int) -> dict[str, Any]:
        """What member `sampler` says of this step; what older epochs left is dropped."""
        deadline = self._deadline()
        while True:
            message = self.links[sampler].recv_control(
                deadline=deadline, interrupt=self._interrupt, what=f"the tokens of step {step}"
            )
            if message.get("type") == "tokens" and (message.get("epoch"), message.get("step")) == (epoch, step):
                return message

    def close(self, reason: str = "") -> None:
        """Close every hot link; peers are told `reason`."""
        for link in self.links.values():
            link.close(reason)
