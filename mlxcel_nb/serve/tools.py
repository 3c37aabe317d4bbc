"""Calls of tools, found in the text of an answer as it comes. Pure.

A model writes a call as its chat template taught it to. Three ways are read here, told apart by the template's text:

* `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3, and many more
* `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`: Mistral
* `{"name": ..., "parameters": {...}}` as the whole answer: Llama 3
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a function: its arguments are JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a model writes calls.

    Args:
        begin: text that a call begins with; nothing of the answer before it is part of one.
        end: text that ends it, "" where it goes on to the end of the answer.
        whole: `begin` is part of the JSON, and counts only at the beginning of the answer.
    """

    begin: str
    end: str = ""
    whole: bool = False


HERMES = Form(begin="<tool_call>", end="</tool_call>")
MISTRAL = Form(begin="[TOOL_CALLS]")
LLAMA = Form(begin='{"name":', whole=True)


def form_of(template: str) -> Form | None:
    """How calls are written by a model with this chat template; None where it is not known here."""
    if "<arg_key>" in template or "<function=" in template:
        return None  # calls in XML, between the same tags
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if '{"name":' in template and '"parameters":' in template:
        return LLAMA
    return None


class Reader:
    """Tells text from calls, piece by piece. What may be the beginning of a call is held back until it is clear.

    A call that cannot be read is text after all: nothing of an answer is lost.
    """

    def __init__(self, form: Form, new_id: Callable[[], str] | None = None) -> None:
        self._form = form
        self._new_id = new_id or (lambda: f"call_{secrets.token_hex(12)}")
        self._held = ""
        self._inside = False
        self._began = False
        self.calls: list[Call] = []

    def feed(self, text: str) -> str:
        """Take a piece; returns what of it is text. Calls that end in it are added to `calls`."""
        self._held += text
        said = ""
        while self._held:
            if self._inside:
                inner, end, rest = self._held.partition(self._form.end) if self._form.end else (self._held, "", "")
                if not end:
                    break
                said += self._call(inner, f"{self._form.begin}{inner}{end}")
                self._held, self._inside = rest, False
                continue
            before, found = self._look()
            said += before
            if not found:
                break
        if said.strip():
            self._began = True
        return said

    def flush(self) -> str:
        """The answer is over: what was held back, less a call in it."""
        held, self._held = self._held, ""
        if not self._inside:
            return held
        self._inside = False
        begin = self._form.begin
        return self._call(begin + held if self._form.whole else held, begin + held)

    def _look(self) -> tuple[str, bool]:
        """Text before the next call, and whether one begins."""
        begin = self._form.begin
        if self._form.whole:
            stripped = self._held.lstrip()
            if self._began or not (stripped.startswith(begin) or begin.startswith(stripped)):
                said, self._held = self._held, ""
                return said, False
            if stripped.startswith(begin):
                self._held, self._inside = stripped[len(begin) :], True
                return "", True
            return "", False
        before, found, rest = self._held.partition(begin)
        if found:
            self._held, self._inside = rest, True
            return before, True
        keep = next((n for n in range(min(len(begin) - 1, len(before)), 0, -1) if before.endswith(begin[:n])), 0)
        cut = len(before) - keep
        self._held = before[cut:]
        return before[:cut], False

    def _call(self, inner: str, raw: str) -> str:
        """Read `inner` as one call or a list of them; `raw` comes back as text where it is none."""
        try:
            value = json.loads(inner.strip())
            found = [_read(each) for each in (value if isinstance(value, list) else [value])]
        except (ValueError, TypeError, KeyError, RecursionError):
            return raw
        self.calls += [Call(id=self._new_id(), name=name, arguments=arguments) for name, arguments in found]
        return ""


def _read(value: Any) -> tuple[str, str]:
    """Name and arguments of one call, whichever word it has for them."""
    name = value["name"]
    arguments = value["arguments"] if "arguments" in value else value.get("parameters", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("not a call")
    return name, json.dumps(arguments, ensure_ascii=False)
