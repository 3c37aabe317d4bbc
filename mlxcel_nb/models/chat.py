"""Chat templates: where a model folder keeps them, and rendering them as Hugging Face's tools do.

Templates come with models and are not trusted: Jinja's immutable sandbox runs them over plain JSON values. Pure apart
from reading the folder; a compiled template may be used from any thread.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxcel_nb.errors import ModelError, PromptError
from mlxcel_nb.models.folder import read_json

TEMPLATE_FILE = "chat_template.jinja"
OLD_TEMPLATE_FILE = "chat_template.json"
TEMPLATE_FOLDER = "additional_chat_templates"
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that a message's reasoning goes by."""


class ChatTemplates:
    """A model's templates by name; most have just `default`."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        self._compiled: dict[str, Any] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt for `messages`.

        Raises:
            PromptError: messages that are none, or the template's own refusal.
        """
        checked = [_checked(message) for message in messages]
        if not checked:
            raise PromptError("the list of messages is empty", advice="Give at least one message.")
        import jinja2

        try:
            template = self._template(self._name(bool(tools)))
            return str(
                template.render(
                    messages=checked,
                    tools=_plain(tools) if tools is not None else None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **{key: _plain(value) for key, value in variables.items()},
                )
            )
        except jinja2.TemplateSyntaxError as error:
            raise PromptError(f"the chat template is malformed: {error.message}, line {error.lineno}") from error
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise PromptError(f"the chat template says: {error}") from error
        except RecursionError as error:
            raise PromptError("the chat template recurses without end") from error

    def source(self, *, tools: bool = False) -> str:
        """The text of the template that is used, where tools are given or not; "" where there is none of that name."""
        return self.sources.get(self._name(tools), "")

    def reads(self, name: str, *, tools: bool = False) -> bool:
        """Whether that template looks at a variable `name`; it need not do anything with it."""
        import jinja2
        import jinja2.meta

        try:
            return name in jinja2.meta.find_undeclared_variables(_environment().parse(self.source(tools=tools)))
        except jinja2.TemplateSyntaxError:
            return True  # `render` has words for it

    def _name(self, tools: bool) -> str:
        return "tool_use" if tools and "tool_use" in self.sources else "default"

    def _template(self, name: str) -> Any:
        if name not in self._compiled:
            if name not in self.sources:
                raise PromptError(f"the model has no {name} chat template, only {', '.join(self.sources)}")
            self._compiled[name] = _environment().from_string(self.sources[name])
        return self._compiled[name]


def chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplates | None:
    """The folder's templates; None for a base model. Template files win over tokenizer_config.json."""
    files = {}
    if (file := folder / TEMPLATE_FILE).is_file():
        files["default"] = _read(file)
    for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")):
        files[file.stem] = _read(file)
    if files:
        return ChatTemplates(files)
    for source in (tokenizer_config, read_json(folder / OLD_TEMPLATE_FILE)):
        if found := _configured(source.get("chat_template")):
            return ChatTemplates(found)
    return None


def _configured(value: Any) -> dict[str, str]:
    """One template, or a list of named ones."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    if isinstance(value, dict):
        return {name: text for name, text in value.items() if isinstance(name, str) and isinstance(text, str)}
    return {}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _checked(message: Any) -> dict[str, Any]:
    """A message as templates expect it: keys that are None dropped, and reasoning under each of its names."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError("a message is not an object with a role", advice='Like {"role": "user", "content": "Hi"}.')
    plain = {key: value for key, value in _plain(message).items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """`value` out of JSON's own types, so that a template gets hold of nothing with methods of its own."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _environment() -> Any:
    """Jinja as chat templates are written for: whitespace rules, helpers, loop controls, and the sandbox."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what a training run learns from; for a prompt it is only its content."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's interface

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return dt.datetime.now().strftime(form)  # noqa: DTZ005 - templates want the user's own date

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment
