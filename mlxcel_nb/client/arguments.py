"""What a program hands to `generate`, `chat` and their kin, looked at before anything is sent. Pure.

A notebook checks no types: a mistake must be told in the words of the call, not come up as an error from within.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mlxcel_nb.errors import PromptError, RequestError
from mlxcel_nb.models.params import SamplingParams

_MESSAGES = 'Pass a list of messages, like [{"role": "user", "content": "Hi"}].'


def check_params(params: Any) -> None:
    """Refuse what is no set of parameters.

    Raises:
        RequestError: saying what it is.
    """
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"params must be SamplingParams, not {_kind(params)}", advice="Write SamplingParams(max_tokens=64)."
        )


def check_prompt(prompt: Any) -> None:
    """Refuse what is neither text nor a row of token ids, which are looked at one by one elsewhere.

    Raises:
        PromptError: saying what it is.
    """
    if not isinstance(prompt, str) and not _is_row(prompt):
        raise PromptError(f"a prompt must be text or a list of token ids, not {_kind(prompt)}")


def check_prompts(prompts: Any) -> None:
    """Refuse what is no list of prompts.

    Raises:
        PromptError: saying what it is, or what one of them is.
    """
    if isinstance(prompts, str) or not _is_row(prompts):
        raise PromptError(f"prompts must be a list of texts or of lists of token ids, not {_kind(prompts)}")
    for prompt in prompts:
        check_prompt(prompt)


def check_messages(messages: Any) -> None:
    """Refuse what is no conversation.

    Raises:
        PromptError: saying what it is, or what one of the messages is.
    """
    if not isinstance(messages, list | tuple):
        raise PromptError(f"a conversation must be a list of messages, not {_kind(messages)}", advice=_MESSAGES)
    if not messages:
        raise PromptError("the list of messages is empty", advice=_MESSAGES)
    for message in messages:
        if not isinstance(message, dict):
            raise PromptError(f"a message must be a dict with a role, not {_kind(message)}", advice=_MESSAGES)


def check_n(n: Any) -> None:
    """Refuse what is no number of answers.

    Raises:
        RequestError: saying what it is.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise RequestError(f"n must be a whole number from 1, not {n!r:.20}")


def prompts_of(given: Any) -> list[Any]:
    """A prompt alone, or several, as a list of them.

    Raises:
        PromptError: it is neither.
    """
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, bytes | bytearray | Mapping):
        raise PromptError(f"prompts must be text, token ids, or a list of either, not {_kind(given)}")
    several = list(given)
    return [several] if several and all(isinstance(each, int) for each in several) else several


def conversations_of(given: Any) -> list[list[Any]]:
    """A conversation alone, or several, as a list of them. An empty list is an empty conversation.

    Raises:
        PromptError: it is neither.
    """
    if not isinstance(given, list | tuple):
        raise PromptError(f"messages must be a list, not {_kind(given)}", advice=_MESSAGES)
    several = [given] if not given or isinstance(given[0], dict) else given
    for each in several:
        check_messages(each)
    return [list(each) for each in several]


def _is_row(value: Any) -> bool:
    """Something in an order, that can be read more than once."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | bytearray | Mapping | set | frozenset)


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__
