"""Chat templates wherever a folder keeps them, as transformers renders them (case 21)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.errors import RequestError
from mlxcel_nb.models.tokenizer import load_tokenizer
from tests.tiny import make_tiny

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>&\n  there"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "é 🙂"},
]
SHORT = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
OTHER = "other {{ messages | length }}"


def folder_with(
    folder: Path, *, config: Any = None, file: str | None = None, more: dict[str, str] | None = None
) -> Path:
    """A tiny model whose chat template stands in the places asked for."""
    make_tiny(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    if config is not None:
        settings["chat_template"] = config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if file is not None:
        (folder / "chat_template.jinja").write_text(file)
    for name, text in (more or {}).items():
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    return folder


def theirs(folder: Path, messages: list[dict[str, Any]] = MESSAGES, **options: Any) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **options}))


@pytest.mark.parametrize(
    ("places", "want"),
    [
        ({"config": SHORT}, "[system:Be brief.]"),
        ({"file": SHORT}, "[system:Be brief.]"),
        ({"config": OTHER, "file": SHORT}, "[system:Be brief.]"),
        ({"config": [{"name": "default", "template": SHORT}, {"name": "tool_use", "template": OTHER}]}, "[system"),
        ({"file": SHORT, "more": {"tool_use": OTHER}}, "[system"),
    ],
    ids=["config", "file", "both: the file wins", "named in the config", "named files"],
)
def test_a_template_is_found_where_transformers_finds_it(tmp_path: Path, places: dict[str, Any], want: str) -> None:
    folder = folder_with(tmp_path, **places)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(MESSAGES) == theirs(folder)
    assert tokenizer.render_chat(MESSAGES).startswith(want)


@pytest.mark.parametrize(
    "places",
    [
        {"config": [{"name": "default", "template": SHORT}, {"name": "tool_use", "template": OTHER}]},
        {"file": SHORT, "more": {"tool_use": OTHER}},
    ],
    ids=["config", "files"],
)
def test_tools_choose_the_template_made_for_them(tmp_path: Path, places: dict[str, Any]) -> None:
    folder = folder_with(tmp_path, **places)
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    assert load_tokenizer(folder).render_chat(MESSAGES, tools=tools) == "other 4" == theirs(folder, tools=tools)


def test_a_base_model_says_to_use_completion(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_with(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="Base model: use completion") as caught:
        tokenizer.chat_prompt(MESSAGES)
    assert "\n" not in str(caught.value)
    assert tokenizer.encode("still works")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "the chat template says: Roles must alternate"),
        ("{% if %}", "the chat template is malformed"),
        ("{{ messages[99].content.zork() }}", "the chat template says"),
        ("{{ 1 / 0 }}", "the chat template says"),
        ("{{ 'a' + 1 }}", "the chat template says"),
        ("{{ messages.append(1) }}", "the chat template says"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "the chat template says"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses"),
    ],
)
def test_a_template_that_fails_shows_its_own_words_and_the_next_one_works(
    tmp_path: Path, template: str, says: str
) -> None:
    tokenizer = load_tokenizer(folder_with(tmp_path, file=template))
    with pytest.raises(RequestError, match=says) as caught:
        tokenizer.chat_prompt(MESSAGES)
    assert "\n" not in str(caught.value)
    assert tokenizer.encode("still works")


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
        "{% for m in messages %}\n  {% if loop.index > 2 %}{% break %}{% endif %}\n  {{- m.content }}\n{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ dict(a=1) }}{{ messages[1].content | trim | upper }}{{ messages[-1]['content'] }}",
        "{% for m in messages %}{% generation %}<{{ m.content }}>{% endgeneration %}{% endfor %}",
        "{{ strftime_now('%Y') | length }}{{ tools is none }}{{ documents is none }}{{ zork is defined }}",
        "{%- for m in messages %}\n\t{{ m.role }}\n{%- endfor %}\n\n{{ add_generation_prompt }}\n",
        "{{ messages[0].reasoning_content is defined }}{{ messages[0].name is defined }}",
    ],
)
def test_templates_render_as_in_transformers(tmp_path: Path, template: str) -> None:
    folder = folder_with(tmp_path, file=template)
    messages = [{"role": "system", "content": "x", "name": None, "reasoning": "why"}, *MESSAGES[1:]]
    assert load_tokenizer(folder).render_chat(messages) == theirs(folder, messages)


@pytest.mark.parametrize("messages", [[], ["hi"], [{}], [{"content": "x"}], [{"role": 3}]], ids=str)
def test_messages_that_are_none_are_refused(tmp_path: Path, messages: list[Any]) -> None:
    tokenizer = load_tokenizer(folder_with(tmp_path, file=SHORT))
    with pytest.raises(RequestError, match="message"):
        tokenizer.chat_prompt(messages)


def test_a_template_sees_values_and_no_objects(tmp_path: Path) -> None:
    class Loud:
        def shout(self) -> str:
            raise AssertionError("a template reached an object")

    tokenizer = load_tokenizer(folder_with(tmp_path, file="{{ messages[0].content }}"))
    assert tokenizer.render_chat([{"role": "user", "content": Loud()}]) == "<Loud>"
