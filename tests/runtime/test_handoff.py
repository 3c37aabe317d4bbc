"""Caches that are sent while they grow: over real links, from members that split the model in one way to members that
split it in another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_caches

from mlxcel_nb.errors import MlxcelError, WireError
from mlxcel_nb.net.bulk.bulk_link import BulkLink
from mlxcel_nb.plan.recutting import WHOLE, ArrayShare, Holdings, kv_share
from mlxcel_nb.plan.shards import split_evenly
from mlxcel_nb.runtime.handoff.account import Account
from mlxcel_nb.runtime.handoff.arrivals import Arrivals
from mlxcel_nb.runtime.handoff.departures import Departures, Target
from mlxcel_nb.scheduling.step_plan import Hand
from tests.net.helpers import detached_pairs

MODEL = bytes(range(32))
HEADS, DIM, CHANNELS = 6, 32, 12
LENGTH = 70
"""Tokens: of chunks of 32, the last one short."""


def whole(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Keys and values of a layer, a window's, and a state, of a whole model."""
    rng = np.random.default_rng(seed)
    kv = rng.standard_normal((2, 1, HEADS, LENGTH, DIM)).astype(np.float32)
    window = rng.standard_normal((1, HEADS, LENGTH, DIM)).astype(np.float32)
    return kv[0], kv[1], window, rng.standard_normal((1, CHANNELS, 3)).astype(np.float32)


def shares(tp: int, rank: int) -> Holdings:
    if tp == 1:
        return ((WHOLE,), (WHOLE,), (WHOLE,), None, (WHOLE,))
    heads, channels = split_evenly(HEADS, tp)[rank], split_evenly(CHANNELS, tp)[rank]
    kv = kv_share(*heads, HEADS)
    return (kv, kv, (ArrayShare(1, (channels,), CHANNELS),), None, kv)


class Reader:
    """A rank that reads: its caches grow chunk by chunk."""

    def __init__(self, tp: int, rank: int) -> None:
        self.name, self.own = f"reader-{rank}", shares(tp, rank)
        self._heads = split_evenly(HEADS, tp)[rank]
        self._channels = split_evenly(CHANNELS, tp)[rank]
        self.over: queue.SimpleQueue[Account | MlxcelError] = queue.SimpleQueue()
        self.departures = Departures(
            self.own, MODEL, heads=HEADS, states={2}, room=lambda tokens: 1 << 24, encoding="plain",
            over=lambda _, how: self.over.put(how),
        )  # fmt: skip

    def caches(self) -> list[Any]:
        plain, window, states = mlx_caches.KVCache(), mlx_caches.RotatingKVCache(16), mlx_caches.ArraysCache(1)
        return [plain, window, states, mlx_caches.KVCache(), mlx_caches.QuantizedKVCache(32, 8)]

    def read(self, caches: list[Any], begin: int, end: int) -> None:
        keys, values, window, state = whole()
        own = slice(*self._heads)
        caches[0].update_and_fetch(mx.array(keys[:, own, begin:end]), mx.array(values[:, own, begin:end]))
        caches[1].update_and_fetch(*[mx.array(window[:, own, begin:end])] * 2)
        caches[4].update_and_fetch(mx.array(keys[:, own, begin:end]), mx.array(values[:, own, begin:end]))
        caches[2][0] = mx.array(state[:, slice(*self._channels)])


class Answerer:
    """A rank that goes on."""

    def __init__(self, tp: int, rank: int) -> None:
        self.name, self.rank, self.own = f"answerer-{rank}", rank, shares(tp, rank)
        self.landed: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.arrivals = Arrivals(self.own, MODEL, limit=1 << 26, landed=lambda *which: self.landed.put(which))


class Scene:
    """Everybody, with a link from each reader to each that goes on."""

    def __init__(self, readers: int, answerers: int, stack: ExitStack) -> None:
        self.readers = [Reader(readers, rank) for rank in range(readers)]
        self.answerers = [Answerer(answerers, rank) for rank in range(answerers)]
        self.ended: queue.SimpleQueue[MlxcelError] = queue.SimpleQueue()
        pairs = iter(detached_pairs(readers * answerers))
        held = {reader.name: reader.own for reader in self.readers}
        targets: dict[str, list[Target]] = {reader.name: [] for reader in self.readers}
        self.links: list[BulkLink] = []
        for answerer in self.answerers:
            wanted = answerer.arrivals.meet("prefill-0", held, answerer.rank)
            for reader in self.readers:
                ours, theirs = next(pairs)
                sender = answerer.arrivals.sender("prefill-0", reader.name)
                out = self._link(ours, lambda _, payload, r=reader, a=answerer: r.departures.frame(a.name, payload))
                self._link(theirs, lambda _, payload, a=answerer, s=sender: a.arrivals.frame(s, payload))
                targets[reader.name].append(Target(answerer.name, out, wanted[reader.name]))
        for reader in self.readers:
            reader.departures.meet("decode-0", targets[reader.name])
        stack.callback(self.close)

    def _link(self, link: Any, on_frame: Any) -> BulkLink:
        made = BulkLink(
            link,
            on_frame=on_frame,
            on_message=lambda *_: None,
            on_end=lambda _, error: self.ended.put(error),
            stall_s=5,
        )
        self.links.append(made)
        made.start()
        return made

    def close(self) -> None:
        for answerer in self.answerers:
            answerer.arrivals.close()
        for link in self.links:
            link.stop()
        for link in self.links:
            link.join(5)
        assert not [t for t in threading.enumerate() if t.name.startswith("bulk-")], "a thread is left"

    def expect(self, transfer: int = 7, length: int = LENGTH, epoch: int = 3) -> None:
        for answerer in self.answerers:
            answerer.arrivals.expect(epoch, transfer, sequence=1, length=length)

    def hand(self, transfer: int = 7) -> Hand:
        return Hand(5, "decode-0", 3, transfer, "request", LENGTH)

    def send(self, transfer: int = 7, *, chunk: int = 32) -> None:
        for reader in self.readers:
            caches = reader.caches()
            reader.departures.begin(self.hand(transfer))
            for begin in range(0, LENGTH, chunk):
                reader.read(caches, begin, end := min(LENGTH, begin + chunk))
                departure = reader.departures.of(5)
                assert departure is not None
                departure.on_layer(caches, end)
                departure.chunk_done(caches)
            reader.departures.finish(5, caches)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.mark.parametrize(("readers", "answerers"), [(1, 1), (1, 3), (3, 1), (2, 3), (3, 2)])
def test_every_member_gets_its_part_of_what_grows_on_others(readers: int, answerers: int, stack: ExitStack) -> None:
    scene = Scene(readers, answerers, stack)
    scene.expect()
    scene.send()
    keys, values, window, state = whole()
    for answerer in scene.answerers:
        assert answerer.landed.get(timeout=10) == (3, 7)
        made = answerer.arrivals.take(7)
        assert sorted(made) == [0, 1, 2, 4] and not answerer.arrivals.nbytes
        own = slice(*split_evenly(HEADS, answerers)[answerer.rank])
        assert np.array_equal(np.array(made[0].keys), keys[:, own]) and np.array_equal(made[0].values, values[:, own])
        codes, scales, biases = made[4].keys
        near = mx.dequantize(codes, scales, biases, group_size=32, bits=8)
        assert (made[4].group_size, made[4].bits, made[4].offset) == (32, 8, LENGTH)
        assert np.abs(np.array(near) - keys[:, own]).max() < 0.03
        assert made[1].offset == LENGTH
        assert np.array_equal(np.array(made[1]._temporal_order(made[1].keys))[:, :, -15:], window[:, own, -15:])
        assert np.array_equal(np.array(made[2][0]), state[:, slice(*split_evenly(CHANNELS, answerers)[answerer.rank])])
    for reader in scene.readers:
        account = reader.over.get(timeout=10)
        assert isinstance(account, Account) and account.after_s > 0 and 0 < account.before < account.sent
        assert account.sent > account.nbytes > 0


def test_arrays_are_made_a_few_at_a_time_before_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    """Of what is here, at each step one cache, or as many as fit."""
    scene = Scene(2, 1, stack)
    scene.expect()
    scene.send()
    arrivals = scene.answerers[0].arrivals
    assert scene.answerers[0].landed.get(timeout=10) == (3, 7)
    monkeypatch.setattr("mlxcel_nb.runtime.handoff.arrivals.PREPARED_BYTES", 1)
    left = [arrivals.nbytes]
    for _ in range(2):
        arrivals.prepare()
        left.append(arrivals.nbytes)
    assert left[0] > left[1] > left[2] > 0
    made = arrivals.take(7)
    keys, values, _, state = whole()
    assert np.array_equal(np.array(made[0].keys), keys) and np.array_equal(np.array(made[0].values), values)
    assert np.array_equal(np.array(made[2][0]), state)
    arrivals.prepare()
    with pytest.raises(WireError, match="is not here"):
        arrivals.take(7)


def test_what_is_not_expected_yet_waits_for_the_plan_that_expects_it(stack: ExitStack) -> None:
    scene = Scene(1, 1, stack)
    scene.send()
    assert scene.answerers[0].landed.empty()
    scene.expect()
    assert scene.answerers[0].landed.get(timeout=10) == (3, 7)
    assert isinstance(scene.readers[0].over.get(timeout=10), Account)


def test_what_nobody_waits_for_any_more_is_refused_and_the_link_lives(stack: ExitStack) -> None:
    scene = Scene(1, 1, stack)
    scene.expect(8, epoch=4)
    scene.send()
    error = scene.readers[0].over.get(timeout=10)
    assert isinstance(error, WireError) and "answerer-0: nobody waits for it any more" in str(error)
    scene.expect(9)
    assert scene.ended.empty(), scene.ended.get()


def test_a_sequence_that_is_not_read_to_its_end_leaves_nothing_and_may_be_sent_again(stack: ExitStack) -> None:
    scene = Scene(2, 1, stack)
    scene.expect()
    for reader in scene.readers:
        caches = reader.caches()
        reader.departures.begin(scene.hand())
        reader.read(caches, 0, 32)
        departure = reader.departures.of(5)
        assert departure is not None
        departure.chunk_done(caches)
        reader.departures.drop(5)
        assert not reader.departures
    scene.send()
    assert scene.answerers[0].landed.get(timeout=10) == (3, 7)


def test_a_link_that_ends_is_an_error_of_every_sequence_on_its_way(stack: ExitStack) -> None:
    scene = Scene(2, 1, stack)
    scene.send()  # and nobody expects it
    scene.links[0].stop("it was cut")
    lost = scene.ended.get(timeout=10)
    scene.readers[0].departures.lost("answerer-0", lost)
    assert isinstance(scene.readers[0].over.get(timeout=10), MlxcelError)
