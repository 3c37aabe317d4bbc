"""Which architectures cannot run several sequences of different lengths in one forward, and why. Pure.

What a cache cannot do is found by itself (`batching_rows.why_not`). Here stand those whose own code in mlx-lm goes
wrong in a batch although their caches could. Any thread.
"""

from __future__ import annotations

UNBATCHED: dict[str, str] = {
    "afm7": "its last layers place their queries by the width of the cache, padding included",
    "gemma2": "its own attention adds a mask of four axes to scores of five",
    "gpt_bigcode": "it looks its learned positions up for one length, which all sequences would have",
    "minimax_m3_vl": "it attends over the best blocks of columns, and padding moves what is in a block",
    "phi3small": "it attends over blocks of columns, and padding moves what is in a block",
}
"""By the file of mlx-lm's that has the model."""


def reason(architecture: str) -> str:
    """Why sequences of `architecture` run one by one; empty where they need not.

    Args:
        architecture: the file of mlx-lm's that has the model, or a file of the model folder's own.
    """
    from mlxcel_nb.models import catalogue  # pure, but large

    if architecture in UNBATCHED:
        return UNBATCHED[architecture]
    entry = catalogue.entry(architecture)
    if entry is None:
        return "nobody has tried it: it is newer than our catalogue, or code of the model's own"
    return "nobody has tried it: mlx-lm cannot run it on the machines we test on" if entry.fails else ""
