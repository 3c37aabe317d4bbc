"""How many groups of sequences keep a pipeline's stages at work, and what is lost at least. Pure."""

from __future__ import annotations

from typing import SupportsIndex

from mlxcel_nb.errors import ConfigError

MOST = 64
"""Groups at most: as many sequences run at once as `Limits.max_rows` says, and an empty group does nothing."""


def check_micro_batches(asked: int, stages: int) -> None:
    """Refuse a number of groups that cannot be, or is of no use; 0 leaves it to us.

    Raises:
        ConfigError: with what can be asked for.
    """
    if not isinstance(asked, SupportsIndex) or isinstance(asked, bool):
        raise ConfigError(f"micro_batches={asked!r:.40} is not a whole number", advice="Write it like micro_batches=2.")
    if not 0 <= asked <= MOST:
        raise ConfigError(f"{asked} micro-batches", advice=f"Ask for 1 to {MOST}; without a number it is one a stage.")
    if asked > 1 and stages == 1:
        raise ConfigError(
            f"{asked} micro-batches for a model in one stage, which is always at work",
            advice="They keep pipeline stages at work: split the model with --pp, or leave them out.",
        )


def micro_batches(stages: int, rows: int, asked: int = 0) -> int:
    """M, the groups that decode in turn: as asked for, or one a stage; never more than `rows` sequences may run.

    With fewer groups than stages some stage always waits. With more, each group is a smaller batch, whose rows cost
    more each, and every stage is at work already.
    """
    return max(1, min(asked or stages, rows))


def bubble(stages: int, groups: int) -> float:
    """The share of its time that a stage waits, at least, where `groups` micro-batches go through at once.

    (S - 1) / (S - 1 + M), of GPipe (Huang et al. 2019, section 2.3): stages fill and drain one after the other.
    """
    return (stages - 1) / (stages - 1 + groups)
