"""Every architecture of the catalogue, or one, whole and in layouts: for the process that `job` starts.

A model of an entry is written to a folder of its own for the time that it takes, and read like any other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mlxcel_nb.cluster.layout import make_layout, parse_apart, parse_name
from mlxcel_nb.errors import ConfigError
from mlxcel_nb.models import catalogue
from mlxcel_nb.models.verifying.comparing import Record, Verdict, compare, merge

if TYPE_CHECKING:
    from mlxcel_nb.models.verifying.running import Run

PROMPT, STEPS = 17, 8
"""Tokens that are read at once, and then one by one. The sliding windows of the catalogue are of 8."""

BATCHES = (1, 3)
VOCABULARY = 257


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One architecture.

    Args:
        features: what is special in it.
        note: what a reader of the result should know.
        untested: mlx-lm has it and the catalogue has not.
        cannot: what mlx-lm itself raised over the whole model, which leaves nothing to compare with.
    """

    name: str
    features: tuple[str, ...] = ()
    note: str = ""
    untested: bool = False
    cannot: str = ""
    verdicts: tuple[Verdict, ...] = ()

    @property
    def wrong(self) -> bool:
        """Some layout that is taken gives something else, or the whole model fails where it should not."""
        expected = (entry := catalogue.entry(self.name)) is not None and bool(entry.fails)
        return any(not each.equal and not each.refused for each in self.verdicts) or bool(self.cannot and not expected)

    @property
    def refused(self) -> bool:
        """No layout can be, so nothing was compared."""
        return bool(self.verdicts) and all(each.refused for each in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        verdicts = [each.to_dict() for each in self.verdicts]
        return {**asdict(self), "features": list(self.features), "verdicts": verdicts, "wrong": self.wrong}

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Self:
        known = {name: value for name, value in told.items() if name != "wrong"}
        verdicts = tuple(Verdict.from_dict(each) for each in told["verdicts"])
        return cls(**{**known, "features": tuple(told["features"]), "verdicts": verdicts})


def examine(name: str, layouts: Sequence[str]) -> Finding:
    """Run one architecture, and say how each layout compares."""
    entry = catalogue.entry(name)
    if entry is None:
        return Finding(name=name, untested=True)
    about = Finding(name=name, features=entry.features, note=entry.note or entry.drifts)
    with tempfile.TemporaryDirectory(prefix="mlxcel-catalogue-") as folder:
        try:
            return replace(about, verdicts=tuple(_verdicts(entry, Path(folder) / name, layouts)))
        except Exception as error:  # noqa: BLE001  # the whole model's failure is a finding
            return replace(about, cannot=words_of(error))


def _verdicts(entry: catalogue.Entry, folder: Path, layouts: Sequence[str]) -> Iterator[Verdict]:
    from mlxcel_nb.models.verifying.running import run

    catalogue.write(entry, folder)
    prompts = [ids(batch) for batch in (BATCHES if entry.batches else BATCHES[:1])]
    n = entry.n_layers
    whole = run(folder, make_layout(n), prompts, STEPS + 1)
    forced = [record.tokens for record in whole.records]
    for name in layouts:
        try:
            split = run_named(folder, n, name, prompts, STEPS + 1, forced=forced)
        except ConfigError as error:
            yield Verdict(layout=name, refused=str(error))
        except Exception as error:  # noqa: BLE001  # the others are still to be tried
            yield Verdict(layout=name, failed=words_of(error))
        else:
            yield compared(name, whole.records, split.records, split.dtype)


def run_named(
    folder: str | Path,
    n_layers: int,
    name: str,
    prompts: Sequence[np.ndarray],
    tokens: int,
    *,
    vocab_parallel: bool = False,
    progress: Any = None,
    **how: Any,
) -> Run:
    """`running.run` in the layout of this name, or `handing.run`, where it names two."""
    from mlxcel_nb.models.verifying import handing, running

    if (apart := parse_apart(name)) is None:
        layout = make_layout(n_layers, **parse_name(name)._asdict())
        return running.run(folder, layout, prompts, tokens, vocab_parallel=vocab_parallel, progress=progress, **how)
    readers, answerers = (make_layout(n_layers, **parse_name(each)._asdict()) for each in apart)
    return handing.run(folder, readers, answerers, prompts, tokens, **how)


def compared(
    name: str, whole: Sequence[Record], split: Sequence[Record], dtype: str, *, judged: bool = True
) -> Verdict:
    """One layout over all prompts."""
    pairs = zip([alike(one, other) for one, other in zip(whole, split, strict=True)], split, strict=True)
    return merge([compare(name, one, other, dtype=dtype, judged=judged and dtype == "float32") for one, other in pairs])


def alike(whole: Record, split: Record) -> Record:
    """`whole` at the positions that `split` has: of a prompt that others read, the last one alone."""
    if split.logits.shape == whole.logits.shape:
        return whole
    return Record(whole.tokens, whole.logits[:, whole.predicted], slice(None))


def ids(batch: int) -> np.ndarray:
    """The prompt of every architecture, (B, L).

    Any would do but for routers: with some, two experts' scores tie to the last digit, and the order of a sum decides.
    """
    return np.random.default_rng(7).integers(0, VOCABULARY, (batch, PROMPT)).astype(np.int32)


def words_of(error: BaseException) -> str:
    """An error on one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
