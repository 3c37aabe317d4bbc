"""The tokens that a model is tried on. Any thread; no MLX."""

from __future__ import annotations

from pathlib import Path

from mlxcel_nb.errors import ConfigError, PromptError
from mlxcel_nb.models.folder import check_tokenizer
from mlxcel_nb.models.info import model_info
from mlxcel_nb.models.tokenizer import load_tokenizer

TEXT = "The lighthouse keeper counted the ships that passed, wrote their names in a book, and went to sleep."
"""What is read where nothing else is given: words that every tokenizer has, and a story to go on with."""


def prompt_ids(folder: Path, text: str, tokens: int) -> list[int]:
    """Ids of `text`, to which `tokens` more will come.

    Raises:
        PromptError: there is nothing to read, or far too much. ConfigError: it is more than the model was made for.
    """
    check_tokenizer(folder)
    context = model_info(folder).context
    ids = load_tokenizer(folder).encode(text, context=context)
    if not ids:
        raise PromptError("the prompt is empty", advice="Give it at least one token.")
    if context and len(ids) + tokens > context:
        raise ConfigError(
            f"a prompt of {len(ids)} tokens and {tokens} more, the model's context is {context}", advice="Shorten it."
        )
    return ids
