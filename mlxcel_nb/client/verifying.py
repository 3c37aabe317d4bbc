"""Whether this cluster gives the same answer whole and split: every layout on its engines, over its links.

The whole model runs on one engine, so nothing of it is needed here but figures. For the thread that holds the cluster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.loading import prepare
from mlxcel_nb.client.report import LoadProgress, LoadReport
from mlxcel_nb.cluster.layout import parse_name
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.models.verifying.comparing import Record, Verdict, compare

WHOLE = "single"


def engines_for(model: str, layouts: Sequence[str], *, allow_code: bool = False) -> int:
    """The most engines that one of the layouts takes.

    Raises:
        ConfigError: a split that cannot work. ModelError: a model that is not there or not whole.
    """
    sizes = [1]
    for name in layouts:
        plan = prepare(model, **parse_name(name)._asdict(), allow_code=allow_code)
        sizes.append(plan.layout.size)
    return max(sizes)


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
    on_layout: Callable[[str], None] = lambda _: None,
    on_progress: Callable[[LoadProgress], None] | None = None,
) -> Iterator[tuple[Verdict, LoadReport]]:
    """Load the model whole, then in each layout, and compare; nothing is loaded afterwards.

    Args:
        prompt: ids to read.
        tokens: how many to make.
        vocab_parallel: tensor ranks share the embedding and the head too.
        judged: equality is promised where activations are float32.
        on_layout: called with a layout's name before it is loaded.

    Raises:
        ClusterError: a model is loaded already. MlxcelError: what a node raised.
    """
    whole: Record | None = None
    for name in (WHOLE, *layouts):
        on_layout(name)
        sizes = parse_name(name)._asdict()
        report = cluster.load(
            model,
            **sizes,
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
        if whole is None:
            whole = record
        else:
            promised = judged and report.dtype == "float32"
            yield compare(name, whole, record, dtype=report.dtype, judged=promised), report


def _record(cluster: Cluster, prompt: Sequence[int], tokens: int, whole: Record | None) -> Record:
    """Free-running first; then fed the whole model's tokens, which are its own for the whole model itself."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with cluster.aside():
        made = np.array([cluster.generate(prompt, params).token_ids])
        fed = made if whole is None else whole.tokens
        seen = cluster.forced(prompt, [int(token) for token in fed[0]])
    return Record(made, seen.logits[None], slice(None), seen.layers)
