"""Runs a model in this process: whole, or every member of a layout, a thread for each rank.

Stages follow each other within a thread, and ranks meet at a barrier where they add up in rank order, so the parts are
those that engines load and the sums are exact copies on all ranks, without an engine or a socket. Expert-parallel ranks
share the sequences out among themselves; one that gets none serves the others. MLX's streams belong to threads, and
live as long as the process: so each rank has one thread for good, and loads on it what it runs. Any thread may call
`run`; one run is made at a time.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_nb.cluster.layout import Layout
from mlxcel_nb.errors import StepTimeout
from mlxcel_nb.models.loading import LoadProgress, give_back, load_part
from mlxcel_nb.models.part import LoadedPart
from mlxcel_nb.models.verifying.comparing import Record
from mlxcel_nb.models.verifying.recording import Recorder, as_floats
from mlxcel_nb.plan.part import part_of

CHUNK = 256
"""Tokens of a prompt that are read at once, as engines do."""

LOAD_S = 900.0
"""For all ranks to have loaded their parts."""

MEET_S = 120.0
"""For all ranks to come to the next sum; they share the cores of one machine."""


@dataclass
class Run:
    """What a layout gave.

    Args:
        records: one for each prompt.
        dtype: of the activations.
        warnings: what loading had to say.
    """

    records: list[Record]
    dtype: str
    warnings: list[str] = field(default_factory=list)


class Meeting:
    """Where the ranks of a stage meet. `all_reduce(rank)` is what a rank calls to add up."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._brought: list[Any] = [None] * size

    def wait(self, seconds: float = MEET_S) -> None:
        self._barrier.wait(seconds)

    def all_reduce(self, rank: int) -> Callable[[mx.array], mx.array]:
        def add(x: mx.array) -> mx.array:
            self._brought[rank] = as_floats(x)
            self.wait()
            total = sum(self._brought[1:], self._brought[0])
            self.wait()  # nobody brings the next before all have taken this one
            return mx.array(total).astype(x.dtype)

        return add

    def gather(self, rank: int) -> Callable[[mx.array, Sequence[int]], mx.array]:
        """What a rank calls to have the columns of all."""

        def side_by_side(x: mx.array, _: Sequence[int]) -> mx.array:
            every = np.concatenate(self.told(rank, as_floats(x)), axis=-1)
            return mx.array(every).astype(x.dtype)

        return side_by_side

    def told(self, rank: int, value: Any) -> list[Any]:
        """What every rank brings, in rank order."""
        self._brought[rank] = value
        self.wait()
        all_of_them = list(self._brought)
        self.wait()
        return all_of_them

    def all_to_all(self, rank: int) -> Callable[[Sequence[bytes]], list[bytes]]:
        """What a rank calls to give each its own."""
        return lambda buffers: [given[rank] for given in self.told(rank, list(buffers))]

    def leave(self) -> None:
        """This rank goes no further: nobody shall wait for it."""
        self._barrier.abort()


def run(
    folder: str | Path,
    layout: Layout,
    prompts: Sequence[np.ndarray],
    tokens: int,
    *,
    forced: Sequence[np.ndarray] | None = None,
    dtype: str = "auto",
    allow_code: bool = False,
    vocab_parallel: bool = False,
    progress: Callable[[LoadProgress], None] | None = None,
) -> Run:
    """Load the model in `layout` and let it answer each prompt greedily.

    Args:
        prompts: ids, (B, L) each.
        tokens: how many to make.
        forced: for each prompt the (B, tokens) ids to be fed when logits and layers are noted; its own when None.
        vocab_parallel: tensor ranks share the embedding and the head too.
        progress: of rank 0's loading.

    Raises:
        MlxcelError: what the first rank that failed raised, unchanged. StepTimeout: one hung.
    """
    meeting = Meeting(layout.width)
    members = [
        Rank(Path(folder), layout, rank, meeting, dtype, allow_code=allow_code, vocab_parallel=vocab_parallel)
        for rank in range(layout.width)
    ]
    members[0].progress = progress
    with one_at_a_time:
        ended = [thread_of(member.rank).call(partial(member, prompts, tokens, forced)) for member in members]
        for end in ended:
            end.wait()  # every wait of a rank has its deadline
    give_back()
    errors = [member.error for member in members if member.error is not None]
    if errors:
        told = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        raise told[0] if told else StepTimeout(f"a rank of {layout.name} did not come to a sum within {MEET_S:g} s")
    records = [
        Record(
            tokens=answers[0].tokens,
            logits=answers[0].logits,
            predicted=slice(prompt.shape[1] - 1, None),
            layers=_layers(answers) if layout.ep == 1 else _layers_together(answers),
        )
        for prompt, answers in zip(prompts, zip(*(member.answers for member in members), strict=True), strict=True)
    ]
    return Run(records, members[0].dtype, list(dict.fromkeys(w for m in members for w in m.warnings)))


one_at_a_time = threading.Lock()


class _Thread:
    """A thread for as long as the process lives. It is a daemon: MLX's streams do not survive an ordered end."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        threading.Thread(target=self._main, name=name, daemon=True).start()

    def call(self, function: Callable[[], None]) -> threading.Event:
        """Run `function`, which raises nothing; the event is set when it has returned."""
        ended = threading.Event()
        self._calls.put((function, ended))
        return ended

    def _main(self) -> None:
        while True:
            function, ended = self._calls.get()
            function()
            del function
            ended.set()


@functools.cache
def thread_of(rank: int) -> _Thread:
    """A rank's one thread. Another for every run would leave a stream of MLX's behind each time."""
    return _Thread(f"rank-{rank}")


@dataclass
class _Answer:
    """One rank's view of one prompt; `layers` by the member's name, layer and step."""

    tokens: np.ndarray
    logits: np.ndarray
    layers: dict[str, dict[int, list[np.ndarray]]]


def _layers(answers: Sequence[_Answer]) -> dict[str, dict[int, np.ndarray]]:
    """What each member saw."""
    return {
        name: {index: np.concatenate(steps) for index, steps in layers.items()}
        for answer in answers
        for name, layers in answer.layers.items()
    }


def _layers_together(answers: Sequence[_Answer]) -> dict[str, dict[int, np.ndarray]]:
    """What all ranks saw of one layer and step, each of its own sequences, in their order."""
    seen = [layers for answer in answers for layers in answer.layers.values() if layers]
    return {
        "all ranks": {
            index: np.concatenate([one for step in zip(*(each[index] for each in seen), strict=True) for one in step])
            for index in seen[0]
        }
    }


class Rank:
    """One rank of every stage, called on a thread of its own."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        rank: int,
        meeting: Meeting,
        dtype: str,
        *,
        allow_code: bool,
        vocab_parallel: bool,
    ) -> None:
        self.rank = rank
        self.answers: list[_Answer] = []
        self.dtype = dtype
        self.warnings: list[str] = []
        self.error: BaseException | None = None
        self.progress: Callable[[LoadProgress], None] | None = None
        self.meeting = meeting
        self._folder, self._layout = folder, layout
        self._allow_code, self._vocab_parallel = allow_code, vocab_parallel
        self._parts: list[LoadedPart] = []

    def __call__(self, prompts: Sequence[np.ndarray], tokens: int, forced: Sequence[np.ndarray] | None) -> None:
        try:
            self._load()
            self.meeting.wait(LOAD_S)
            for index, prompt in enumerate(prompts):
                self.answers.append(self._answer(prompt, tokens, forced[index] if forced is not None else None))
        except BaseException as error:  # noqa: BLE001  # handed to the thread that waits for all
            self.error = error
            self.meeting.leave()
        finally:
            self._parts.clear()  # on the thread that made them

    def _load(self) -> None:
        layout = self._layout
        for stage in range(layout.pp):
            part = load_part(
                self._folder,
                part_of(layout, stage, self.rank, vocab_parallel=self._vocab_parallel),
                dtype=self.dtype,
                all_reduce=self.meeting.all_reduce(self.rank) if layout.tp > 1 else None,
                exchange=self.meeting.all_to_all(self.rank) if layout.ep > 1 else None,
                gather=self.meeting.gather(self.rank),
                progress=self.progress,
                allow_code=self._allow_code,
            )
            self._parts.append(part)
            self.warnings += part.warnings
        self.dtype = self._parts[-1].dtype

    def _answer(self, prompt: np.ndarray, tokens: int, forced: np.ndarray | None) -> _Answer:
        recorders = [Recorder() for _ in self._parts]
        logits, made = self._decode(prompt, tokens, forced, recorders)
        if forced is not None:
            _, made = self._decode(prompt, tokens, None, None)
        names = [member_name(self._layout, stage, self.rank) for stage in range(self._layout.pp)]
        layers = {name: recorder.steps for name, recorder in zip(names, recorders, strict=True)}
        return _Answer(made, logits, layers)

    def _decode(
        self, prompt: np.ndarray, tokens: int, forced: np.ndarray | None, recorders: list[Recorder] | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logits of every position, (B, L + tokens - 1, V), and the tokens that were fed, (B, tokens)."""
        caches = [part.make_cache() for part in self._parts]
        rows = [self._step(prompt[:, at : at + CHUNK], caches, recorders) for at in range(0, prompt.shape[1], CHUNK)]
        fed: list[np.ndarray] = []
        for index in range(tokens):
            fed.append(forced[:, index] if forced is not None else rows[-1][:, -1].argmax(-1))
            if index + 1 < tokens:
                rows.append(self._step(fed[-1][:, None], caches, recorders))
        return np.concatenate(rows, axis=1), np.stack(fed, axis=1)

    def _step(self, ids: np.ndarray, caches: list[list[Any]], recorders: list[Recorder] | None) -> np.ndarray:
        if self._layout.ep > 1:
            ids = np.array_split(ids, self._layout.ep)[self.rank]
            if not len(ids):
                self._parts[0].serve()
                return self._logits(None)
        x: Any = mx.array(ids.astype(np.int32))
        for lap in range(self._parts[0].laps):
            for index, (part, cache) in enumerate(zip(self._parts, caches, strict=True)):
                on_layer = recorders[index].on_layer if recorders else None
                x = part.forward(x, cache, on_layer, all_logits=True, lap=lap)
        samples = self._parts[-1].part.samples
        if not samples:  # another rank has the logits, but this one takes part in all that leads to them
            mx.eval(x)
        return self._logits(as_floats(x) if samples else None)

    def _logits(self, mine: np.ndarray | None) -> np.ndarray:
        """Of all sequences, from the ranks that have some."""
        return np.concatenate([some for some in self.meeting.told(self.rank, mine) if some is not None])


def member_name(layout: Layout, stage: int, rank: int) -> str:
    """What a member of a layout is called where it has no node."""
    words = [f"stage {stage}"] if layout.pp > 1 else []
    words += [f"rank {rank}"] if layout.width > 1 else []
    return ", ".join(words) or "whole"
