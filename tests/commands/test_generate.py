"""Where a request's prompt comes from, and what is kept of its answer."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.client.report import Completion
from mlxcel_nb.commands.console import TerminalConsole
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.generate import _option, kept, params_from
from mlxcel_nb.commands.parser import UsageProblem, Where, parse
from mlxcel_nb.commands.session import Session
from mlxcel_nb.commands.tree import build
from mlxcel_nb.errors import ConfigError, EngineLost, RequestError


def asked(*words: str, where: Where = Where.SHELL) -> argparse.Namespace:
    model = ["--model", "m"] if where is Where.SHELL else []
    return parse(build(where), ["generate", *model, *words])


def test_a_shell_takes_a_prompt_from_standard_input_and_a_notebook_a_dash_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Zürich\n\n".encode())))
    assert _option(asked("--prompt", "-")) == "Zürich\n"
    assert _option(asked("--prompt", "-", where=Where.MAGIC)) == "-"


def test_a_prompt_from_a_file_loses_one_line_end(tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_bytes(b"  two\nlines\n")
    for where in (Where.SHELL, Where.MAGIC):
        assert _option(asked("--prompt-file", str(file), where=where)) == "  two\nlines"
    with pytest.raises(UsageProblem, match="a --prompt and a --prompt-file"):
        _option(asked("--prompt-file", str(file), "--prompt", "x"))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        _option(asked("--prompt-file", str(file)))


def test_the_form_of_an_answer_is_given_in_words_or_in_a_file(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "yes.lark"
    schema.write_text('{"type": "object"}\n')
    grammar.write_text('start: "yes"\n')
    for where in (Where.SHELL, Where.MAGIC):
        assert params_from(asked("--json-schema", str(schema), where=where)).json_schema == '{"type": "object"}'
        assert (
            params_from(asked("--json-schema", ' {"type": "string"}', where=where)).json_schema == ' {"type": "string"}'
        )
        assert params_from(asked("--grammar", str(grammar), where=where)).grammar == 'start: "yes"'
        assert params_from(asked("--regex", r"a\d+", where=where)).regex == r"a\d+"
        assert params_from(asked("--json-object", where=where)).json_object
        assert not params_from(asked(where=where)).constrained
    with pytest.raises(ConfigError, match=r"none\.json: No such file"):
        params_from(asked("--json-schema", str(tmp_path / "none.json")))
    with pytest.raises(RequestError, match="json_object and regex are both given"):
        params_from(asked("--regex", "a", "--json-object"))
    with pytest.raises(RequestError, match="regex cannot be used: unclosed group"):
        params_from(asked("--regex", "((("))


def test_what_there_is_of_an_answer_that_fails_is_kept() -> None:
    half = Completion(text="half", token_ids=(1,), finish_reason="error")
    stream: Any = argparse.Namespace(completion=half)
    context = Context(TerminalConsole(), Session())
    with (
        pytest.raises(EngineLost),
        kept(stream, asked("-o", "answer", where=Where.MAGIC), context),
    ):
        raise EngineLost("was killed", node="engine-0")
    assert context.names["answer"] is half
