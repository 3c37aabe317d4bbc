"""From a request to the token ids of its prompts, with the model's own tokenizer and chat template.

Done here and not by the engines, so that a request which its template refuses is answered at once and takes nobody's
place. No MLX is imported. Any thread may call; the tokenizer is read when the first prompt comes.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from mlxcel_nb.models.chat import ChatTemplates, chat_templates
from mlxcel_nb.models.folder import read_json
from mlxcel_nb.models.info import model_info
from mlxcel_nb.models.tokenizer import Tokenizer, load_tokenizer
from mlxcel_nb.serve.answers import PART, Token
from mlxcel_nb.serve.failures import refused
from mlxcel_nb.serve.requests import Ask
from mlxcel_nb.serve.tools import Form, form_of

_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that are not for callers to set."""


class Prompter:
    """The tokenizer and the chat template of the model in `folder`."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._tokens: dict[int, Token] = {}

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder)

    @functools.cached_property
    def _context(self) -> int:
        return model_info(self.folder).context

    @functools.cached_property
    def _templates(self) -> ChatTemplates | None:
        folder = Path(self.folder)
        return chat_templates(folder, read_json(folder / "tokenizer_config.json"))

    def prepare(self, ask: Ask) -> tuple[list[list[int]], Form | None]:
        """Token ids of each prompt, and how the model writes calls where there are tools.

        Raises:
            ApiError: the template cannot do what is asked. PromptError: it refuses, in its own words, or the prompt is
                far beyond the context.
        """
        if ask.messages is None:
            return [self._ids(each) for each in ask.prompts], None
        form, variables = self._form(bool(ask.tools)), self._variables(ask)
        ids = self._tokenizer.chat_prompt(
            ask.messages, tools=ask.tools or None, variables=variables, context=self._context
        )
        return [ids], form

    def _ids(self, prompt: str | tuple[int, ...]) -> list[int]:
        return self._tokenizer.encode(prompt, context=self._context) if isinstance(prompt, str) else list(prompt)

    def token(self, token: int) -> Token:
        """What one token adds to a text; with U+FFFD where it is only part of a character."""
        if token not in self._tokens:
            anchor, base = self._anchor
            text = self._tokenizer.decode([*anchor, token])
            # Alone, or at the beginning, some tokenizers drop a token's space.
            alone = text[len(base) :] if text.startswith(base) else self._tokenizer.decode([token])
            data = self._tokenizer.bytes_of(token) if PART in alone else alone.encode()
            self._tokens[token] = Token(alone, data)
        return self._tokens[token]

    @functools.cached_property
    def _anchor(self) -> tuple[list[int], str]:
        ids = self._tokenizer.encode("a", add_special=False)
        return ids, self._tokenizer.decode(ids)

    def _variables(self, ask: Ask) -> dict[str, Any]:
        templates = self._templates
        for name in ask.variables:
            given = name in {*_GIVEN, *self._tokenizer.special_tokens}
            if given or (templates is not None and not templates.reads(name, tools=bool(ask.tools))):
                raise refused(f"the model's chat template has no {name!r:.40} to set", f"{name:.40}")
        return ask.variables

    def _form(self, wanted: bool) -> Form | None:
        templates = self._templates
        if not wanted or templates is None:
            return None
        if not templates.reads("tools", tools=True):
            raise refused("the model's chat template has no place for tools", "tools", "unsupported_parameter")
        form = form_of(templates.source(tools=True))
        if form is None:
            raise refused("the way this model writes calls of tools is not known", "tools", "unsupported_parameter")
        return form
