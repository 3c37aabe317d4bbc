"""What a step gave, and how its leader hears of it from whoever samples. Touches no array."""

from __future__ import annotations

from typing import Any

from mlxcel_nb import errors
from mlxcel_nb.errors import MlxcelError, WireError
from mlxcel_nb.models.sampling import Sampled
from mlxcel_nb.runtime.protocol import field
from mlxcel_nb.scheduling.step_plan import StepPlan

Outcome = dict[int, Sampled | MlxcelError]
"""What a step sampled, by sequence: a token, or why there is none."""


def doing(plan: StepPlan) -> str:
    """What a member is at, for who asks."""
    return "prefill" if any(work.chunks for work in plan.work) else "decode"


def told(epoch: int, step: int, outcome: Outcome) -> dict[str, Any]:
    """What the leader is told of a step."""
    tokens = [
        [row, x.token, x.logprob, [i for i, _ in x.top], [each for _, each in x.top]]
        for row, x in outcome.items() if isinstance(x, Sampled)
    ]  # fmt: skip
    failed = [[row, x.to_dict()] for row, x in outcome.items() if isinstance(x, MlxcelError)]
    return {"type": "tokens", "epoch": epoch, "step": step, "tokens": tokens, "failed": failed}


def heard(message: dict[str, Any]) -> Outcome:
    """The inverse of `told`.

    Raises:
        WireError: it is no such thing.
    """
    outcome: Outcome = {}
    try:
        for row, token, logprob, ids, likely in field(message, "tokens", list):
            top = tuple((int(i), float(x)) for i, x in zip(ids, likely, strict=True))
            outcome[int(row)] = Sampled(int(token), float(logprob), top)
        for row, error in field(message, "failed", list):
            outcome[int(row)] = errors.from_dict(error)
    except (TypeError, ValueError, AttributeError):
        raise WireError("the tokens of a step cannot be read") from None
    return outcome
