"""What a user hears of a split that nobody has tried with an architecture. Any thread."""

from __future__ import annotations

from mlxcel_nb.plan.part import Part


def remark(split: str, architecture: str) -> list[str]:
    """One sentence where the catalogue has not proved `split`, none where it has.

    Args:
        split: in words, as in "pipeline stages".
        architecture: the file of mlx-lm's that has the model.
    """
    from mlxcel_nb.models import catalogue  # pure, but large: whoever splits nothing has no use for it

    entry = catalogue.entry(architecture)
    if entry is not None and not entry.fails:
        return []
    return [
        f"{split} of model type {architecture} are untested: "
        + ("mlx-lm cannot run it on the machines we test on" if entry else "it is newer than our catalogue")
        + "; compare with the whole model before you rely on it"
    ]


def of_ranks(architecture: str, part: Part) -> list[str]:
    """The same of what shares layers; stages, which can be refused besides, are `stages.check_stages`'s."""
    words = {"tensor ranks": part.tp_size, "expert-parallel ranks": part.ep_size}
    return [line for split, size in words.items() if size > 1 for line in remark(split, architecture)]
