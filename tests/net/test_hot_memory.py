"""Hot links and memory: every size, any buffer that is given to be sent, memory that is lent out or was lent."""

from __future__ import annotations

import array
import concurrent.futures
import contextlib
import ctypes
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from mlxcel_nb.errors import Cancelled, StepTimeout, WireError
from mlxcel_nb.net.collectives.group import Group, Tag
from mlxcel_nb.net.hot.hot_link import HotLink, Interrupt
from mlxcel_nb.net.hot.inbox import TENSOR_CHANNEL
from mlxcel_nb.net.hot.moulds import SHORT_BYTES
from mlxcel_nb.wire import tensors
from mlxcel_nb.wire.frames import Kind
from tests.net.helpers import both, deliver, hot_pair, soon
from tests.net.moved import both_moved

MB = 1 << 20

SIZES = [edge + beside for edge in (1, SHORT_BYTES, tensors.PART_BYTES) for beside in (-1, 0, 1)]
STEPS = [8, 9, 10, 11, 98, 99, 100, 101, 10**17, 10**18 - 1]
"""Tags one digit longer than those before."""


def content(size: int, seed: int) -> bytes:
    return random.Random(f"{size} {seed}").randbytes(size)


def end_in(link: HotLink, draw: random.Random, tag: Tag, size: int, seed: int) -> None:
    """Receive the tensor of `tag` in one of the ways there are, and look at it."""
    into = memoryview(bytearray(size + 8))[8:] if draw.random() < 0.3 else None
    got = link.recv_tensor(tag, into=into, deadline=soon(20))
    assert (got.tag, got.dtype, got.dims) == (tag, "uint8", (size,))
    assert got.data == content(size, seed)
    assert into is None or into == got.data


@pytest.mark.parametrize("rekey_every", [None, 1])
@pytest.mark.parametrize("size", SIZES)
def test_every_size_goes_through_with_tags_that_grow(size: int, rekey_every: int | None) -> None:
    with hot_pair(rekey_every=rekey_every) as (a, b):

        def end(link: HotLink, first: bool) -> None:
            draw = random.Random(size)
            for step in STEPS:
                for sends in (first, not first):
                    if sends:
                        link.send_tensor(Tag(1, step, 0), "uint8", (size,), content(size, step), deadline=soon(20))
                    else:
                        end_in(link, draw, Tag(1, step, 0), size, step)

        both(lambda: end(a, True), lambda: end(b, False))


@pytest.mark.parametrize("pair", [hot_pair, both_moved], ids=["tcp", "shared memory"])
@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_sent_in_whatever_order_arrives_as_it_was(seed: int, pair: Any) -> None:
    """Both ends follow one plan drawn by chance: tensors and messages of either, several in a row."""
    draw = random.Random(seed)
    plan = []
    for step in range(150):
        size = draw.choice((0, 1, 100, 8192, 8192, 8192, SHORT_BYTES, SHORT_BYTES + 1, 700_000, 2 * MB))
        plan.append((draw.random() < 0.5, draw.choice(("tensor", "tensor", "tensor", "message")), step, size))
    with pair() as (a, b):
        for link in (a, b):
            link.spin.most_s = draw.choice((0.0, 150e-6))

        def end(link: HotLink, first: bool) -> None:
            chance = random.Random(seed)
            for from_first, what, step, size in plan:
                if from_first == first and chance.random() < 0.1:
                    link._replies.append((Kind.PING, 0, b"12345678"))
                if what == "message":
                    if from_first == first:
                        link.send_control({"step": step, "filler": content(size, step)}, deadline=soon(20))
                    else:
                        said = link.recv_control(deadline=soon(20))
                        assert said == {"step": step, "filler": content(size, step)}
                elif from_first == first:
                    link.send_tensor(Tag(1, step, 0), "uint8", (size,), content(size, step), deadline=soon(20))
                else:
                    end_in(link, chance, Tag(1, step, 0), size, step)

        both(lambda: end(a, True), lambda: end(b, False))


# -- what is given to be sent -------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [[3, 4], (np.int64(3), np.int32(4)), (np.uint8(3), 4), [12], ()])
def test_dims_may_be_any_sequence_of_whole_numbers(dims: Sequence[int]) -> None:
    data = np.arange(int(np.prod(dims)), dtype=np.float32)
    with hot_pair() as (a, b):
        for step in range(3):
            a.send_tensor(Tag(1, step, 0), "float32", dims, data)
            got = b.recv_tensor(Tag(1, step, 0), deadline=soon(10))
            assert got.dims == tuple(dims) and all(type(dim) is int for dim in got.dims)
            assert got.data == data.tobytes()


def test_dims_of_small_numpy_integers_do_not_overflow() -> None:
    data = bytes(200 * 200)
    with hot_pair() as (a, b):
        a.send_tensor(Tag(1, 1, 0), "uint8", (np.uint8(200), np.uint8(200)), data)
        assert b.recv_tensor(Tag(1, 1, 0), deadline=soon(10)).dims == (200, 200)


def buffers() -> Iterator[tuple[str, tuple[int, ...], Any]]:
    x = np.arange(24, dtype=np.float32)
    read_only = x.copy()
    read_only.flags.writeable = False
    yield "float32", (24,), x
    yield "float32", (24,), memoryview(x)
    yield "float32", (24,), read_only
    yield "float32", (4, 6), x.reshape(4, 6)
    yield "float32", (6, 4), x.reshape(4, 6).T
    yield "float32", (12,), x[::2]
    yield "float32", (24,), x[::-1]
    yield "float32", (4, 1, 2), x.reshape(4, 6)[:, None, ::3]
    yield "float32", (0, 5), np.zeros((0, 5), np.float32)
    yield "float32", (5, 0), memoryview(np.zeros((5, 0), np.float32))
    yield "float32", (), np.float32(7)
    yield "uint8", (8, 1), memoryview(np.arange(8, dtype=np.uint8).reshape(8, 1))
    yield "uint8", (2, 4), memoryview(np.arange(8, dtype=np.uint8).reshape(2, 4))
    yield "uint8", (0, 4), memoryview(np.zeros((0, 4), np.uint8))
    yield "uint8", (4,), memoryview(b"abcdefgh")[::2]
    yield "uint8", (8,), memoryview(np.arange(8, dtype=np.uint8)[::-1])
    yield "int8", (8,), np.arange(8, dtype=np.int8)
    yield "bool", (3,), np.array([True, False, True])
    yield "complex64", (2,), np.array([1 + 2j, 3j], np.complex64)
    yield "float64", (3,), array.array("d", [1, 2, 3])
    yield "float32", (3,), (ctypes.c_float * 3)(1, 2, 3)
    yield "float32", (1 << 18,), np.arange(1 << 18, dtype=np.float32)
    yield "float32", (1 << 17,), np.arange(1 << 18, dtype=np.float32)[::2]


@pytest.mark.parametrize(("dtype", "dims", "buffer"), list(buffers()))
def test_buffers_of_every_kind_travel_in_c_order(dtype: str, dims: tuple[int, ...], buffer: Any) -> None:
    with hot_pair() as (a, b):
        for step in range(3):
            a.send_tensor(Tag(1, step, 0), dtype, dims, buffer, deadline=soon(10))
            got = b.recv_tensor(Tag(1, step, 0), deadline=soon(10))
            assert (got.dtype, got.dims, bytes(got.data)) == (dtype, dims, memoryview(buffer).tobytes())


def test_what_cannot_travel_is_refused_and_the_link_goes_on() -> None:
    with hot_pair() as (a, b):
        wrong: list[tuple[str, Sequence[int], bytes]] = [
            ("uint8", (4,), b"abc"), ("float32", (1,), b"abc"), ("what", (3,), b"abc"), ("uint8", (1,) * 9, b"a"),
            ("uint8", (-1,), b""), ("uint8", (1 << 32, 0), b""), ("uint8", (SHORT_BYTES,), bytes(SHORT_BYTES + 1)),
        ]  # fmt: skip
        for dtype, dims, data in wrong:
            with pytest.raises(WireError):
                a.send_tensor(Tag(1, 1, 0), dtype, dims, data)
        a.send_tensor(Tag(1, 1, 0), "uint8", (3,), b"abc")
        assert b.recv_tensor(Tag(1, 1, 0), deadline=soon(10)).data == b"abc"


# -- memory that is lent ------------------------------------------------------------------------------


@pytest.mark.parametrize("as_given", [lambda data: data, lambda data: np.frombuffer(data, np.uint8)])
@pytest.mark.parametrize("size", [5_000, 300_000, MB])
def test_what_came_can_be_sent_back_as_it_is_while_more_comes(size: int, as_given: Callable[..., Any]) -> None:
    """Received, and sent on from where it lies, by an end that has no credit left until its own peer reads.

    An array over what is lent lies where that does, though it does not say whose memory it is.
    """
    with hot_pair() as (ours, theirs):
        for step in range(1, 65):
            theirs.send_tensor(Tag(0, step, 0), "uint8", (1,), b"x")  # all the credit there is

        def send_and_hear() -> list[bytes]:
            for step in range(1, 4):
                ours.send_tensor(Tag(1, step, 0), "uint8", (size,), bytes([step]) * size, deadline=soon(10))
            return [bytes(ours.recv_tensor(Tag(1, step, 0), deadline=soon(10)).data) for step in range(1, 4)]

        def echo() -> None:
            for step in range(1, 4):
                got = as_given(theirs.recv_tensor(Tag(1, step, 0), deadline=soon(10)).data)
                theirs.send_tensor(Tag(1, step, 0), "uint8", (size,), got, deadline=soon(10))

        came, _ = both(send_and_hear, echo)
        assert came == [bytes([step]) * size for step in range(1, 4)]


AFTER_IT = Tag(1, 2, 0)


@contextlib.contextmanager
def in_two_parts(link: HotLink, tag: Tag, data: bytes) -> Iterator[threading.Event]:
    """A thread that sends the first pieces of a large tensor; the others, and a small one, once the event is set."""
    parts = list(tensors.payloads(tensors.encode("uint8", (len(data),), tag.name, data), 77))
    parts.append(tensors.encode("uint8", (3,), AFTER_IT.name, b"end"))
    frames = [memoryview(bytes(link._sealer.seal(Kind.TENSOR, TENSOR_CHANNEL, *part))) for part in parts]
    go_on = threading.Event()

    def send() -> None:
        deliver(link, frames[:2])
        assert go_on.wait(20)
        deliver(link, frames[2:])

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        yield go_on
        sending.result(20)


def cut_short(link: HotLink, tag: Tag, into: memoryview, how: str) -> None:
    """Receive until nothing more comes."""
    if how == "time":
        with pytest.raises(StepTimeout):
            link.recv_tensor(tag, into=into, deadline=soon(0.2))
        return
    interrupt = Interrupt()
    timer = threading.Timer(0.2, interrupt.set, [Cancelled("stop")])
    timer.start()
    with pytest.raises(Cancelled):
        link.recv_tensor(tag, into=into, deadline=soon(20), interrupt=interrupt)
    timer.join()
    interrupt.close()


@pytest.mark.parametrize("rekey_every", [None, 2])
@pytest.mark.parametrize("seed", range(3))
def test_tensors_that_were_given_up_in_the_middle_leave_no_trace_in_those_that_follow(
    seed: int, rekey_every: int | None
) -> None:
    """Of any size and after any piece, with other frames between, into memory of either side's."""
    draw = random.Random(seed)
    part = tensors.PART_BYTES
    plan = []
    for step in range(30):
        size = draw.choice((100, part // 2, part - 30, 2 * part, 3 * part, 3 * part + 7, 5 * part))
        pieces = len(list(tensors.payloads(tensors.encode("uint8", (size,), Tag(1, step, 0).name, bytes(size)), 0)))
        given_up_after = draw.randrange(1, pieces) if pieces > 1 and draw.random() < 0.5 else None
        plan.append((step, size, given_up_after, draw.choice((0, 0, part, part + 20)), draw.random() < 0.3))
    with hot_pair(rekey_every=rekey_every) as (a, b):

        def send() -> None:
            for step, size, given_up_after, filler, _ in plan:
                out = a.outgoing(tensors.encode("uint8", (size,), Tag(1, step, 0).name, content(size, step)))
                if given_up_after is not None:
                    out._payloads = itertools.islice(out._payloads, given_up_after - 1)
                a._drive(out, soon(20), None, "")
                if filler:
                    a.send_control({"": bytes(filler)}, deadline=soon(20))
            a.recv_control(deadline=soon(20))

        def receive() -> None:
            for step, size, given_up_after, _, own_memory in plan:
                if given_up_after is None:
                    into = memoryview(bytearray(size)) if own_memory else None
                    got = b.recv_tensor(Tag(1, step, 0), into=into, deadline=soon(20))
                    assert got.data == content(size, step)
            for _, _, _, filler, _ in plan:
                assert not filler or b.recv_control(deadline=soon(20)) == {"": bytes(filler)}
            b.send_control({})

        both(send, receive)


@pytest.mark.parametrize("how", ["time", "cancel"])
def test_memory_of_the_caller_s_is_left_alone_once_the_call_has_failed(how: str) -> None:
    """The rest of the tensor comes during a later call, for whatever that is, and the caller has other uses by then."""
    with hot_pair() as (a, b):
        mine = bytearray(3 * MB)
        with in_two_parts(a, Tag(1, 1, 0), content(3 * MB, 0)) as go_on:
            cut_short(b, Tag(1, 1, 0), memoryview(mine), how)
            mine[:] = content(3 * MB, 1)
            go_on.set()
            assert b.recv_tensor(AFTER_IT, deadline=soon(10)).data == b"end"
        assert mine == content(3 * MB, 1)


def test_a_tensor_that_is_asked_for_again_comes_whole_to_where_it_is_wanted_now() -> None:
    data = content(3 * MB, 0)
    with hot_pair() as (a, b):
        mine = memoryview(bytearray(6 * MB))
        with in_two_parts(a, Tag(1, 1, 0), data) as go_on:
            cut_short(b, Tag(1, 1, 0), mine[: 3 * MB], "time")
            go_on.set()
            got = b.recv_tensor(Tag(1, 1, 0), into=mine[3 * MB :], deadline=soon(10))
        assert mine[3 * MB :] == data == got.data
        got.data[:3] = b"its"
        assert mine[3 * MB : 3 * MB + 3] == b"its"


@pytest.mark.parametrize("size", [12, 3 * MB])
def test_memory_to_receive_into_may_hold_numbers_of_any_type(size: int) -> None:
    data = np.arange(size // 4, dtype=np.float32)
    with hot_pair() as (a, b):
        mine = np.zeros((2, size // 8) if size > 12 else 3, np.float32)
        sending = threading.Thread(target=a.send_tensor, args=(Tag(1, 1, 0), "float32", data.shape, data))
        sending.start()
        b.recv_tensor(Tag(1, 1, 0), into=memoryview(mine), deadline=soon(10))
        sending.join(10)
        assert np.array_equal(mine.reshape(-1), data)


@pytest.mark.parametrize("into", [memoryview(b"read only"), memoryview(bytearray(18))[::2]])
def test_memory_that_cannot_be_received_into_is_refused_before_anything_is_read(into: memoryview) -> None:
    with hot_pair() as (a, b):
        a.send_tensor(Tag(1, 1, 0), "uint8", (9,), b"some data")
        with pytest.raises((ValueError, TypeError)):
            b.recv_tensor(Tag(1, 1, 0), into=into, deadline=soon(10))
        assert b.recv_tensor(Tag(1, 1, 0), deadline=soon(10)).data == b"some data"


def test_arrays_without_elements_are_summed_and_gathered() -> None:
    with hot_pair() as (a, b):
        groups = Group(0, {1: a}), Group(1, {0: b})
        for dims in ((0,), (3, 0), ()):
            for seq in range(3):
                tag = Tag(1, len(dims), seq)
                x = np.ones(dims, np.float32)
                sums = both(*(partial(group.all_reduce, tag, x) for group in groups))
                assert all(np.array_equal(total, np.full(dims, 2, np.float32)) for total in sums)
