"""Whether a request can run at all, and how far. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mlxcel_nb.errors import PromptError, PromptTooLong, RequestError
from mlxcel_nb.scheduling.limits import Limits
from mlxcel_nb.scheduling.sequence import Request


def most_tokens(request: Request, limits: Limits, rooms: Sequence[int]) -> int:
    """How many tokens the request may make: as asked, and as context and memory allow.

    The last one is never read, so it needs no room.

    Args:
        request: what is asked.
        limits: of the instance.
        rooms: tokens of the longest sequence that fits on each home alone.

    Raises:
        RequestError: it can never run.
    """
    length, context = len(request.prompt), limits.context
    if not length:
        raise PromptError("the prompt is empty", advice="Give it at least one token.")
    if request.max_tokens < 1:
        raise RequestError("at least one token has to be made")
    if context and length > context:
        raise PromptTooLong(f"the prompt has {length} tokens, the model's context is {context}", advice="Shorten it.")
    if request.home is not None and not 0 <= request.home < limits.homes:
        raise RequestError(
            f"rank {request.home} is asked for, and the model has {limits.homes} with sequences of their own",
            advice="Leave the rank out, or load the model with --ep.",
        )
    room = min(rooms) if request.home is None else rooms[request.home]
    if length > room:
        raise PromptTooLong(
            f"the prompt has {length} tokens, and the nodes have room for {room}",
            advice="Shorten it, or load the model on more nodes.",
        )
    return min(request.max_tokens, room - length + 1, context - length + 1 if context else request.max_tokens)
