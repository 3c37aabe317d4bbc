"""Expert parallel ranks: each has some experts whole, and runs the rest of the model for its own sequences alone.

Where the model calls its experts, the rank *dispatches*: each token goes, once, to every rank that has an expert it
chose; each rank runs its own experts over what came, from itself too; and the outputs are *combined*: they go back to
where the token is at home, which weighs and adds them as it would in one process. Routing is decided in one place, and
no sum is taken in another order. Both ways are an all-to-all in which every rank takes part. A rank without a token of
its own, in a step, does not run the model: it `serve`s, mixture after mixture, in the order in which the others come to
them. The scheme is that of DeepEP's low-latency kernels (DeepSeek-AI 2025), over our links.

For the MLX thread. What other ranks send is checked before an index of it is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_nb.errors import ConfigError, ModelError, WireError
from mlxcel_nb.models.arrays import as_bytes, from_bytes, wire_name
from mlxcel_nb.models.sharding.asking import ITEM_BYTES, TYPES, Ask, pack_answer, read_answer
from mlxcel_nb.models.sharding.block import Block, Rank, Whole
from mlxcel_nb.models.sharding.families import rule
from mlxcel_nb.models.sharding.feed_forward import experts as experts_rule
from mlxcel_nb.models.sharding.standins import become
from mlxcel_nb.plan.cuts import Cut
from mlxcel_nb.plan.experts import dense, experts_in, spread
from mlxcel_nb.plan.part import Part

Exchange = Callable[[Sequence[bytes]], Sequence[memoryview | bytes]]
"""An all-to-all: takes a buffer for each rank, this one included, and gives what each has for this one. What it gives
is valid until it is called again."""


def find(model: Any, config: Mapping[str, Any], part: Part, group: Callable[[str], int]) -> list[Block]:
    """The stacked experts of `model` in the order it runs them, each with its cuts for `part`'s rank.

    Raises:
        ConfigError: it has none, too few for so many ranks, or some that cannot be spread.
    """
    rank = Rank(part.ep_rank, part.ep_size, group)
    blocks = []
    for path, module in sorted(model.named_modules(), key=lambda named: _natural(named[0])):
        if (found := rule(module)) is None or found[1] is not experts_rule:
            continue
        block = Block(path, module, rank, model)
        try:
            spread(count(block), part.ep_size)
            experts_rule(block, spread=True)
            block.check()
        except Whole as why:
            what = f"the experts of {path} cannot be spread over {part.ep_size} ranks: {why}"
            raise ConfigError(what, advice="Split the model by --tp or --pp.") from None
        blocks.append(block)
    if not blocks and experts_in(config):
        what = f"the experts of model type {config.get('model_type')} are modules of their own, which are not spread"
        raise ConfigError(what, advice="Split the model by --tp or --pp.")
    if not blocks:
        raise dense(str(config.get("model_type")), part.ep_size)
    return blocks


def cuts(blocks: Iterable[Block]) -> dict[str, Cut]:
    """The share of each array that is not kept whole, by its name."""
    return {block.full(name): cut for block in blocks for name, cut in block.cuts.items()}


def count(block: Block) -> int:
    """Experts of a block that holds them stacked."""
    return max((shape[0] for shape in block.shapes.values() if len(shape) > 2), default=0)


def _natural(path: str) -> list[tuple[bool, int, str]]:
    """Sorts layer 10 after layer 9."""
    return [(not word.isdigit(), int(word) if word.isdigit() else 0, word) for word in re.split(r"\.", path)]


@dataclass(frozen=True)
class Mixture:
    """A module of stacked experts: how many there are on all ranks, and how many here."""

    path: str
    run: Callable[[mx.array, mx.array], mx.array]
    total: int
    held: int


class Dispatch:
    """One rank's side of the exchange, for all mixtures of its model.

    Args:
        rank, size: among the ranks.
        exchange: the all-to-all.
        names: of all ranks, for errors.
    """

    def __init__(self, rank: int, size: int, exchange: Exchange, names: Sequence[str] = ()) -> None:
        self.rank, self.size = rank, size
        self.mixtures: list[Mixture] = []
        self._names = list(names) or [f"rank {each}" for each in range(size)]
        self._exchange = exchange
        self._next = 0

    def begin(self) -> None:
        """A step of the model begins."""
        self._next = 0

    def end(self) -> None:
        """It has ended.

        Raises:
            ModelError: not every mixture was run, and the other ranks wait.
        """
        if self._next != len(self.mixtures):
            raise ModelError(f"the model ran {self._next} of its {len(self.mixtures)} mixtures of experts in a step")

    def serve(self, check: Callable[[], None]) -> None:
        """Take part in a step with no token of this rank's own.

        Args:
            check: called before each mixture; what it raises leaves the step.
        """
        for mixture in self.mixtures:
            check()
            self._run(mixture, None, np.zeros((0, 1), np.int64))

    def ask(self, number: int, x: mx.array, indices: mx.array) -> mx.array:
        """What the experts chosen by `indices`, (..., K), make of `x`, (..., D), wherever they are: (..., K, D).

        Raises:
            ModelError: the model runs its mixtures in another order than they are listed in, or its router is broken.
        """
        mixture = self.mixtures[number]
        if number != self._next:
            raise ModelError(f"the model runs the experts of {mixture.path} out of turn")
        self._next += 1
        if x.shape[:-1] != indices.shape[:-1]:
            raise ModelError(f"{mixture.path}: choices of shape {indices.shape} for tokens of shape {x.shape}")
        chosen = np.array(indices.astype(mx.int32)).astype(np.int64).reshape(-1, indices.shape[-1])
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < mixture.total:
            raise ModelError(f"{mixture.path}: an expert was chosen that is not there")
        made = self._run(mixture, x.reshape(-1, x.shape[-1]), chosen)
        assert made is not None
        return made.reshape(*indices.shape, -1)

    def _run(self, mixture: Mixture, x: mx.array | None, chosen: np.ndarray) -> mx.array | None:
        """Dispatch, run this rank's experts over what came, combine: (rows * K, D), None without rows."""
        spans = spread(mixture.total, self.size)
        flat = chosen.reshape(-1)
        owner = np.searchsorted([stop for _, stop in spans], flat, side="right")
        slots = [np.flatnonzero(owner == rank) for rank in range(self.size)]
        rows = (
            np.zeros((0, 0), np.uint8) if x is None else np.frombuffer(as_bytes(x), np.uint8).reshape(len(chosen), -1)
        )
        kind = TYPES[0] if x is None else wire_name(x.dtype)
        asks = []
        for mine, (first, _) in zip(slots, spans, strict=True):
            tokens, row = np.unique(mine // chosen.shape[1], return_inverse=True)
            asks.append(Ask(kind, rows[tokens], row, flat[mine] - first).pack())
        came = [Ask.read(data, mixture.held, self._names[rank]) for rank, data in enumerate(self._exchange(asks))]
        answers = self._exchange(self._answers(mixture, came))
        if x is None:
            return None
        told = [read_answer(data, len(slots[rank]), self._names[rank]) for rank, data in enumerate(answers)]
        given = {rank: (found, made.shape[1]) for rank, (found, made) in enumerate(told) if len(made)}
        kind, width = self._same("its experts give", given) if given else (kind, rows.shape[1])
        out = np.empty((flat.size, width), np.uint8)
        for mine, (_, made) in zip(slots, told, strict=True):
            if len(mine):
                out[mine] = made
        return from_bytes(out.reshape(-1).data, kind, (flat.size, width // ITEM_BYTES[TYPES.index(kind)]))

    def _same(self, what: str, kinds: Mapping[int, tuple[str, int]]) -> tuple[str, int]:
        """The type and the bytes of a row that all of `kinds`, by rank, agree on.

        Raises:
            WireError: one has another than this rank, or than the first if this rank has none; the node is named.
        """
        due = kinds.get(self.rank) or next(iter(kinds.values()))
        for rank, (kind, width) in kinds.items():
            if (kind, width) != due:
                raise WireError(
                    f"{what} {kind} in {width} bytes where others have {due[0]} in {due[1]}",
                    node=self._names[rank], advice="Load the model with one --dtype for all nodes.",
                )  # fmt: skip
        return due

    def _answers(self, mixture: Mixture, came: Sequence[Ask]) -> list[bytes]:
        """What this rank's experts make of all that came, in one go."""
        asking = [rank for rank, ask in enumerate(came) if len(ask.row)]
        nothing = pack_answer(TYPES[0], np.zeros((0, 0), np.uint8))
        answers = [nothing] * len(came)
        if not asking:
            return answers
        kind, width = self._same(
            "its tokens are", {rank: (came[rank].kind, came[rank].rows.shape[1]) for rank in asking}
        )
        x = np.concatenate([came[rank].rows[came[rank].row] for rank in asking])
        experts = np.concatenate([came[rank].expert for rank in asking])
        tokens = from_bytes(x.reshape(-1).data, kind, (len(x), width // ITEM_BYTES[TYPES.index(kind)]))
        made = mixture.run(tokens, mx.array(experts[:, None].astype(np.uint32))).squeeze(-2)
        rows = np.frombuffer(as_bytes(made), np.uint8).reshape(len(x), -1)
        at = 0
        for rank in asking:
            pairs = len(came[rank].row)
            answers[rank] = pack_answer(wire_name(made.dtype), rows[at : at + pairs])
            at += pairs
        return answers


class Dispatched:
    """Experts of which this rank has some: what they are asked goes to the ranks that have them."""

    __slots__ = ()

    def __call__(self, x: Any, indices: Any) -> Any:
        return self._ask(x, indices)  # type: ignore[attr-defined]


def join(model: Any, blocks: Sequence[Block], dispatch: Dispatch) -> None:
    """Have the mixtures of `model`, whose weights are in place, go through `dispatch`."""
    modules = dict(model.named_modules())
    for number, block in enumerate(blocks):
        module = modules[block.path]
        own = partial(type(module).__call__, module)
        first, stop = spread(count(block), dispatch.size)[dispatch.rank]
        dispatch.mixtures.append(Mixture(block.path, own, count(block), stop - first))
        become(module, Dispatched, ask=partial(dispatch.ask, number))
