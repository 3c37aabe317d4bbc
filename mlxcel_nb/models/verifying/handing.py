"""Reads a prompt in one layout and answers it in another, in this process: between them goes what nodes would send.

As in `running`, a thread for each rank, and ranks that meet where they add up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_nb.cluster.layout import Layout
from mlxcel_nb.models.arrays import as_bytes
from mlxcel_nb.models.cache_parts import caches_of, cut_out, put_together, restored
from mlxcel_nb.models.cache_shares import holdings
from mlxcel_nb.models.cache_state import describe
from mlxcel_nb.models.caches import every
from mlxcel_nb.models.loading import give_back
from mlxcel_nb.models.verifying.comparing import Record
from mlxcel_nb.models.verifying.running import CHUNK, Meeting, Rank, Run, member_name, one_at_a_time, thread_of
from mlxcel_nb.plan.recutting import Holdings, Want, wants
from mlxcel_nb.wire.kv import ArraySpec
from mlxcel_nb.wire.kv_assembler import ArrivedLayer

Sent = dict[int, list[tuple[Want, ArrivedLayer]]]
"""By cache, what has come of it."""


def run(
    folder: str | Path,
    readers: Layout,
    answerers: Layout,
    prompts: Sequence[np.ndarray],
    tokens: int,
    *,
    forced: Sequence[np.ndarray] | None = None,
    dtype: str = "auto",
    allow_code: bool = False,
) -> Run:
    """Have the prompts read in one layout and answered in the other; the first token's logits are of those who read.

    Args:
        prompts: ids, (B, L) each.
        forced: for each prompt the (B, tokens) ids to be fed when logits are noted; its own when None.

    Raises:
        MlxcelError: what the first rank that failed raised.
    """
    meetings = Meeting(readers.width), Meeting(answerers.width)
    given = {"allow_code": allow_code, "vocab_parallel": False}
    reading = [_Reader(Path(folder), readers, n, meetings[0], dtype, **given) for n in range(readers.width)]
    answering = [_Answerer(Path(folder), answerers, n, meetings[1], dtype, **given) for n in range(answerers.width)]
    records = []
    with one_at_a_time:
        try:
            for ranks in (reading, answering):
                _all(ranks, [each.load for each in ranks])
            wanted = _wanted(reading, answering)
            for number, batch in enumerate(prompts):
                rows = [_answered(reading, answering, wanted, prompt, tokens, None) for prompt in batch]
                made, logits = (np.stack(each) for each in zip(*rows, strict=True))
                if forced is not None:
                    fed = zip(batch, forced[number], strict=True)
                    told = [_answered(reading, answering, wanted, prompt, tokens, ids) for prompt, ids in fed]
                    logits = np.stack([each for _, each in told])
                records.append(Record(tokens=made, logits=logits, predicted=slice(None)))
            kind, warnings = answering[0].dtype, [w for each in (*reading, *answering) for w in each.warnings]
        finally:
            _all([*reading, *answering], [each.drop for each in (*reading, *answering)])
    give_back()
    return Run(records, kind, list(dict.fromkeys(warnings)))


def _answered(
    reading: Sequence[_Reader],
    answering: Sequence[_Answerer],
    wanted: Mapping[str, Mapping[str, Sequence[Want]]],
    prompt: np.ndarray,
    tokens: int,
    fed: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens (T,) after a prompt (L,), and their logits (T, V)."""
    _all(reading, [each.reads(prompt, wanted) for each in reading])
    sent = _merged(each.sent for each in reading)
    first = reading[0].logits
    _all(answering, [each.goes_on(len(prompt), first, sent, tokens, fed) for each in answering])
    return answering[0].tokens, answering[0].seen


def _all(ranks: Sequence[Rank], does: Sequence[Callable[[], None]]) -> None:
    """Have each of `ranks` do its own, on its thread; what the first that failed raised."""
    failed: list[BaseException] = []

    def guarded(rank: Rank, do: Callable[[], None]) -> None:
        try:
            do()
        except BaseException as error:  # noqa: BLE001  # handed to the thread that waits for all
            failed.append(error)
            rank.meeting.leave()

    each = zip(ranks, does, strict=True)
    ended = [thread_of(rank.rank).call(partial(guarded, rank, do)) for rank, do in each]
    for end in ended:
        end.wait()
    told = [error for error in failed if not isinstance(error, threading.BrokenBarrierError)]
    if failed:
        raise (told or failed)[0]


def _wanted(reading: Sequence[_Reader], answering: Sequence[_Answerer]) -> dict[str, dict[str, tuple[Want, ...]]]:
    """What each member that answers wants of each that reads."""
    kept = {name: each for rank in reading for name, each in rank.kept.items()}
    members = {name: each for rank in answering for name, each in rank.kept.items()}
    return {name: wants(own, kept, turn=turn) for turn, (name, own) in enumerate(members.items())}


def _merged(each: Any) -> dict[str, Sent]:
    found: dict[str, Sent] = {}
    for sent in each:
        for name, caches in sent.items():
            for cache, came in caches.items():
                found.setdefault(name, {}).setdefault(cache, []).extend(came)
    return found


class _Member(Rank):
    """A rank of every stage, whose members have names."""

    kept: dict[str, Holdings]

    def load(self) -> None:
        self._load()
        names = [member_name(self._layout, stage, self.rank) for stage in range(self._layout.pp)]
        self.kept = {name: holdings(part) for name, part in zip(names, self._parts, strict=True)}

    def drop(self) -> None:
        self._parts.clear()


class _Reader(_Member):
    """Reads prompts; what others want of its caches is then in `sent`, and what follows in `logits`."""

    sent: dict[str, Sent]
    logits: np.ndarray

    def reads(self, prompt: np.ndarray, wanted: Mapping[str, Mapping[str, Sequence[Want]]]) -> Callable[[], None]:
        def read() -> None:
            caches = [part.make_cache() for part in self._parts]
            for at in range(0, len(prompt), CHUNK):
                self.logits = self._step(prompt[None, at : at + CHUNK], caches, None)[0, -1]
            self.sent = {}
            for name, asked in wanted.items():
                for (own, share), cache in zip(self.kept.items(), caches, strict=True):
                    leaves = list(every(cache))
                    for want in asked[own]:
                        kept = share[want.cache]
                        assert kept is not None
                        came = self.sent.setdefault(name, {}).setdefault(want.cache, [])
                        came.append((want, _sent(leaves[want.cache], kept, want)))

        return read


def _sent(cache: Any, share: Any, want: Want) -> ArrivedLayer:
    state = describe(cache)
    arrays = cut_out(state, share, want)
    axes = [spec.axis for spec in state.specs]
    specs = tuple(ArraySpec(s.dtype, a, tuple(x.shape)) for s, a, x in zip(state.specs, axes, arrays, strict=True))
    return ArrivedLayer(state.layout, state.dtype, specs, tuple(as_bytes(mx.array(x)) for x in arrays), state.scalars)


class _Answerer(_Member):
    """Goes on after a prompt that others have read."""

    tokens: np.ndarray
    seen: np.ndarray

    def goes_on(
        self, length: int, first: np.ndarray, sent: Mapping[str, Sent], count: int, fed: np.ndarray | None
    ) -> Callable[[], None]:
        def go_on() -> None:
            caches = []
            for (name, own), part in zip(self.kept.items(), self._parts, strict=True):
                came = sent.get(name, {})
                held = {n: share for n, share in enumerate(own) if share is not None}
                kept = {n: restored(put_together(share, came[n])) for n, share in held.items()}
                caches.append(caches_of(part, kept, length))
            seen = [first]
            for index in range(count - 1):
                token = seen[-1].argmax() if fed is None else fed[index]
                seen.append(self._step(np.array([[token]]), caches, None)[0, -1])
            self.seen = np.stack(seen)
            self.tokens = self.seen.argmax(-1)

        return go_on
