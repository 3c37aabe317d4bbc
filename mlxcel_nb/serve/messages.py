"""The messages and tools of a chat request, from OpenAI's shape to that of chat templates. Pure.

Templates were written for plain text, for calls whose arguments are objects, and know no role "developer".
"""

from __future__ import annotations

import json
from typing import Any

from mlxcel_nb.serve.failures import refused

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

MAX_TOOLS = 128


def messages_of(value: Any, *, most: int) -> list[dict[str, Any]]:
    """`messages` of a request, each checked and reshaped.

    Args:
        most: tokens that fit, and so messages.

    Raises:
        ApiError: one that is none, naming it as `messages.3.role`.
    """
    if not isinstance(value, list) or not value:
        raise refused("messages must be a list of at least one message", "messages")
    if len(value) > most:
        raise refused(f"{len(value)} messages; at most {most} tokens fit, and each takes several", "messages")
    return [_message(message, f"messages.{index}") for index, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise refused(f"{where} must be an object", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise refused(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    calls = message.get("tool_calls")
    content = _content(message.get("content"), f"{where}.content")
    if content is None and not (role == "assistant" and calls):
        raise refused(f"{where}.content is missing", f"{where}.content")
    plain = {**message, "role": ROLES[role], "content": content or ""}
    if calls is not None:
        if role != "assistant":
            raise refused(f"{where}: only an assistant has tool calls", f"{where}.tool_calls")
        plain["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    return plain


def _content(value: Any, where: str) -> str | None:
    """Text, or parts of text."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refused(f"{where} must be a string or a list of parts", where)
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise refused(f"{where}: only parts of type text can be read here", where)
        texts.append(part[kind])
    return "".join(texts)


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise refused(f"{where} must be a list", where)
    calls = []
    for index, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise refused(f"{where}.{index} must be a call of a function with a name", f"{where}.{index}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise refused(f"{where}.{index}: its arguments are not JSON", f"{where}.{index}") from None
        calls.append({**call, "function": {**function, "arguments": {} if arguments is None else arguments}})
    return calls


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """`tools` of a request; None for none.

    Raises:
        ApiError: one that is no function with a name.
    """
    if not value:
        return None
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise refused(f"tools must be a list of at most {MAX_TOOLS}", "tools")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise refused(f"tools.{index} must be of type function, with a name", f"tools.{index}")
        if not isinstance(function.get("parameters", {}), dict):
            raise refused(f"tools.{index}.function.parameters must be a JSON schema", f"tools.{index}")
    return value
