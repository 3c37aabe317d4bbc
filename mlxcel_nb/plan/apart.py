"""How many groups of nodes should only read prompts, and how many only answer, and what that costs. Pure.

Where every group does both, none of them ever waits for another; but whoever is being answered gets tokens at half the
pace while a prompt is read. Apart he does not, and larger batches are answered; but the kind of group that has less to
do waits for the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxcel_nb.plan.estimate import Load, Times

FELT_S = 1.0
"""Seconds that a prompt takes to be read, from which on it is worth while: a judgement, which no measurement has
confirmed yet. A shorter one is over before a reader has noticed."""

ANSWER = 128
"""Tokens of an answer."""


@dataclass(frozen=True)
class Apart:
    """So many groups of each kind.

    Args:
        read_s: what a prompt takes.
        share: of the requests a second that the same nodes answer if each group does both.
    """

    prefill: int
    decode: int
    read_s: float
    share: float


def apart(times: Times, load: Load, groups: int) -> Apart | None:
    """The best numbers of groups, or None where none should only read.

    Args:
        times: of one group.
        groups: copies of the model that there are nodes for.
    """
    if groups < 2 or load.sequences < 2 or times.first < FELT_S:
        return None
    together = groups / (times.first + _answer_s(times, load, groups))
    rates = {n: min(n / times.first, (groups - n) / _answer_s(times, load, groups - n)) for n in range(1, groups)}
    prefill = max(rates, key=lambda n: rates[n])
    return Apart(prefill, groups - prefill, times.first, rates[prefill] / together)


def _answer_s(times: Times, load: Load, groups: int) -> float:
    """Seconds of a group's time that an answer takes, of which it makes several at once: a step reads the weights once
    for all, and takes as long as its rows take to compute where that is longer.
    """
    rows = max(1.0, load.sequences / groups)
    return ANSWER * max(times.token, rows * times.first / load.prompt) / rows
