"""How many groups of sequences keep a pipeline's stages at work, and what is lost at least. Pure."""

from __future__ import annotations


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
