"""Whether this cluster gives the same answer whole and split: every layout on its engines, over its links.

The whole model runs on one engine, so nothing of it is needed here but figures. For the thread that holds the cluster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.plans import check_count, prepare
from mlxcel_nb.client.report import LoadProgress, LoadReport
from mlxcel_nb.cluster.layout import members_of, parse_apart, parse_name
from mlxcel_nb.errors import ConfigError, EngineLost, MlxcelError, PeerLost
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.models.verifying.comparing import Record, Verdict, compare

WHOLE = "single"

Room = Callable[[str, int], None]
"""Refuses a layout, by name, that takes more engines, by count, than there are: with a `ConfigError`."""


def refusals(model: str, layouts: Sequence[str], room: Room, *, allow_code: bool = False) -> dict[str, str]:
    """Why each layout that cannot be is refused, as far as can be told before anything is loaded.

    Args:
        room: of engines.

    Raises:
        ModelError: a model that is not there or not whole.
    """
    found: dict[str, str] = {}
    for name in layouts:
        try:
            prepare(model, **split_of(name), allow_code=allow_code)
            room(name, members_of(name))
        except ConfigError as error:
            found[name] = str(error)
    return found


def split_of(name: str) -> dict[str, Any]:
    """What a layout's name means for `Cluster.load`."""
    if (apart := parse_apart(name)) is None:
        return parse_name(name)._asdict()
    return {"prefill": 1, "decode": 1, "prefill_layout": apart.readers, "decode_layout": apart.answerers}


def room_in(cluster: Cluster, *, kept: bool = True) -> Room:
    """That of a cluster that runs. What is lost comes back with another cluster only.

    Args:
        kept: it goes on afterwards; else it was started for this, and another is started next time.
    """

    def check(name: str, needed: int) -> None:
        if needed > cluster.n:
            advice = f"Start one with {needed}, or verify this --in-process."
            raise ConfigError(f"{name} needs {needed} engines, {cluster.name} has {cluster.n}", advice=advice)
        lost = list(cluster.lost)
        if needed > cluster.n - len(lost):
            dead = f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} dead"
            raise ConfigError(f"{name} needs {needed} engines, but {dead}", advice=_anew(kept=kept))

    return check


def room_here(name: str, needed: int) -> None:
    """That of a cluster that is to be started on this machine: a `Room`."""
    try:
        check_count(needed)
    except ConfigError as error:
        raise ConfigError(f"{name} needs {needed} engines", advice=f"{error.advice}") from None


def verify(
    cluster: Cluster,
    model: str,
    layouts: Sequence[str],
    prompt: Sequence[int],
    tokens: int,
    *,
    dtype: str = "auto",
    allow_code: bool = False,
    vocab_parallel: bool = False,
    judged: bool = True,
    kept: bool = True,
    on_layout: Callable[[str], None] = lambda _: None,
    on_progress: Callable[[LoadProgress], None] | None = None,
) -> Iterator[tuple[Verdict, LoadReport | None]]:
    """Load the model whole, then in each layout, and compare; nothing is loaded afterwards.

    What a layout raises is its verdict, and the others are still tried; there is a report of those that were loaded.

    Args:
        prompt: ids to read.
        tokens: how many to make.
        vocab_parallel: tensor ranks share the embedding and the head too.
        judged: equality is promised where activations are float32.
        kept: the cluster goes on afterwards.
        on_layout: called with a layout's name before it is loaded.

    Raises:
        ClusterError: a model is loaded already. MlxcelError: what a node raised over the whole model.
    """

    def run(name: str, whole: Record | None) -> tuple[Record, LoadReport]:
        on_layout(name)
        room(name, members_of(name))
        report = cluster.load(
            model,
            **split_of(name),
            prefill_from=0,
            dtype=dtype,
            allow_code=allow_code,
            vocab_parallel=vocab_parallel,
            on_progress=on_progress,
        )
        try:
            record = _record(cluster, prompt, tokens, whole)
        except BaseException:
            with contextlib.suppress(MlxcelError):  # the first error is the one to tell
                cluster.unload()
            raise
        cluster.unload()
        return record, report

    room = room_in(cluster, kept=kept)
    try:
        whole, _ = run(WHOLE, None)
    except (EngineLost, PeerLost) as error:
        raise _nothing_loaded(error, kept=kept) from None
    for name in layouts:
        try:
            split, report = run(name, whole)
        except ConfigError as error:
            yield Verdict(layout=name, refused=str(error)), None
        except (EngineLost, PeerLost) as error:
            yield Verdict(layout=name, failed=str(_nothing_loaded(error, kept=kept))), None
        except MlxcelError as error:
            yield Verdict(layout=name, failed=str(error)), None
        else:
            promised = judged and report.dtype == "float32"
            yield compare(name, whole, split, dtype=report.dtype, judged=promised), report


def _nothing_loaded(error: MlxcelError, *, kept: bool) -> MlxcelError:
    """A loss with what there is to do here, where models are loaded and unloaded by nobody's command."""
    told = type(error)(error.cause, node=error.node, advice=_anew(kept=kept))
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told


def _anew(*, kept: bool) -> str:
    return f"{'Stop the cluster and start it again, then verify' if kept else 'Verify'} once more."


def _record(cluster: Cluster, prompt: Sequence[int], tokens: int, whole: Record | None) -> Record:
    """Free-running first; then fed the whole model's tokens, which are its own for the whole model itself."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with cluster.aside():
        made = np.array([cluster.generate(prompt, params).token_ids])
        fed = made if whole is None else whole.tokens
        seen = cluster.forced(prompt, [int(token) for token in fed[0]])
    return Record(made, seen.logits[None], slice(None), seen.layers)
