"""Which tokens end an answer, and which may not come yet. Pure; any thread.

The sampling rank and the leader decide by the same words: what the first may not draw before `min_tokens`, the second
ends an answer by afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlxcel_nb.models.params import SamplingParams

_NONE: frozenset[int] = frozenset()


class Ending:
    """Where one answer may end by a token of its own.

    Args:
        eos_ids: the model's end-of-text tokens; they count for nothing when the request ignores them.

    Attributes:
        ids: every token that ends this answer. Such a token is no text.
    """

    def __init__(self, params: SamplingParams, eos_ids: Iterable[int] = ()) -> None:
        ends = frozenset(params.stop_token_ids)
        self.ids = ends if params.ignore_eos else ends | frozenset(eos_ids)
        self._min_tokens = params.min_tokens

    def ends(self, token: int) -> bool:
        """Whether the answer is over with `token`."""
        return token in self.ids

    def barred(self, made: int) -> frozenset[int]:
        """Tokens that may not come after the first `made` ones. A constraint that allows nothing else overrules it."""
        return self.ids if made < self._min_tokens else _NONE
