"""The one tree behind magics and command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from mlxcel_nb.commands.generate import params_from
from mlxcel_nb.commands.parser import HelpAsked, Parser, UsageProblem, Where, parse, split
from mlxcel_nb.commands.tree import build

TREES = {where: build(where) for where in (Where.MAGIC, Where.SHELL)}


def levels(parser: Parser, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for name, child in parser.commands().items():
        yield from levels(child, (*words, name))


LEVELS = [(where, words) for where, tree in TREES.items() for words in levels(tree)]


@pytest.mark.parametrize(
    ("where", "words"), LEVELS, ids=lambda value: " ".join(value) if isinstance(value, tuple) else value.name
)
def test_help_at_every_level_is_text_and_never_an_exit(where: Where, words: tuple[str, ...]) -> None:
    for flag in ("-h", "--help"):
        with pytest.raises(HelpAsked) as asked:
            parse(TREES[where], [*words, flag])
        prog = " ".join(["%mlxcel" if where is Where.MAGIC else "mlxcel-nb", *words])
        assert asked.value.text.startswith(f"usage: {prog}")
        assert "\x1b" not in asked.value.text


@pytest.mark.parametrize(
    ("where", "words"), LEVELS, ids=lambda value: " ".join(value) if isinstance(value, tuple) else value.name
)
def test_every_leaf_has_a_handler_that_exists(where: Where, words: tuple[str, ...]) -> None:
    import importlib

    node = TREES[where]
    for word in words:
        node = node.commands()[word]
    if node.commands():
        return
    module, _, function = node.get_default("handler").partition(":")
    assert callable(getattr(importlib.import_module(f"mlxcel_nb.commands.{module}"), function))


@pytest.mark.parametrize("where", TREES, ids=lambda where: where.name)
@pytest.mark.parametrize("line", ["plan m --nodes 1GB --json", "verify --model m --json"])
def test_reports_are_told_to_programs_from_cells_too(where: Where, line: str) -> None:
    assert parse(TREES[where], split(line)).json


@pytest.mark.parametrize(
    ("where", "line", "says"),
    [
        (Where.MAGIC, "", "%mlxcel needs a command: cluster, status, load"),
        (Where.MAGIC, "cluster", "%mlxcel cluster needs a command: start, status, stop, list. See: %mlxcel cluster -h"),
        (Where.MAGIC, "clutser start", "no such command 'clutser', perhaps cluster"),
        (Where.MAGIC, "cluster strat", "no such command 'strat', perhaps start. See: %mlxcel cluster -h"),
        (Where.MAGIC, "cluster start -n 0", "'0' is not a whole number from 1"),
        (Where.MAGIC, "cluster start -n two", "'two' is not a whole number from 1"),
        (Where.MAGIC, "cluster start --cluster two", "%mlxcel cluster start does not take '--cluster', perhaps --name"),
        (Where.MAGIC, "load m --name two", "%mlxcel load does not take '--name', perhaps --cluster"),
        (Where.MAGIC, "generate --max-token 3", "'--max-token', perhaps --max-tokens"),
        (Where.MAGIC, "generate --json", "%mlxcel generate does not take '--json'"),
        (Where.MAGIC, "generate --model m", "does not take '--model'"),
        (Where.MAGIC, "load", "required: MODEL"),
        (Where.MAGIC, "load m --dtype flot32", "no such choice 'flot32', perhaps float32"),
        (Where.MAGIC, "load a b", "%mlxcel load does not take 'b'"),
        (Where.MAGIC, "load --modle m", "does not take '--modle'"),
        (Where.MAGIC, "generate --max-tokens abc", "--max-tokens: must be a whole number, not 'abc'"),
        (Where.MAGIC, "generate --temp warm", "must be a number, not 'warm'"),
        (Where.MAGIC, "demo", "demo works only in a shell: mlxcel-nb demo"),
        (Where.MAGIC, "net listen", "net listen works only in a shell: mlxcel-nb net listen"),
        (Where.SHELL, "load m", "load works only in a notebook: %mlxcel load"),
        (Where.SHELL, "cluster start", "cluster start works only in a notebook: %mlxcel cluster start"),
        (Where.SHELL, "cluster strat", "no such command 'strat', only list"),
        (Where.SHELL, "generate --modle m --prompt p", "does not take '--modle', perhaps --model"),
        (Where.SHELL, "generate --prompt p -o x", "required: --model"),
        (Where.SHELL, "net ping h:1 --link 5", "'5' is not a latency, a rate or a loss. Write LATENCY,RATE,LOSS"),
        (Where.SHELL, "net ping h:1 --link -5ms", "'-5ms' is not a latency, a rate or a loss. Write LATENCY,RATE,LOSS"),
        (Where.SHELL, "net ping h:1 --count -5", "'-5' is not a whole number from 1"),
        (Where.SHELL, "net ping h:1 --size 1048577", "not a size from 0 to 1048576 bytes"),
    ],
)
def test_a_wrong_line_is_one_sentence_and_a_pointer(where: Where, line: str, says: str) -> None:
    with pytest.raises(UsageProblem) as problem:
        parse(TREES[where], split(line))
    assert says in str(problem.value)
    assert "\n" not in str(problem.value)
    assert "-h" in str(problem.value)


def test_an_open_quote_is_explained() -> None:
    with pytest.raises(UsageProblem, match="a quote is not closed"):
        split("chat --system Don't")


def test_options_of_a_request() -> None:
    line = (
        "generate --max-tokens 64 --temp 0.7 --top-p .9 --top-k 40 --min-p 0.05 --repetition-penalty 1.1 --seed 1 "
        r'--stop "\n\n" --stop "</a>" --ignore-eos -o out --template --min-tokens 3 --presence-penalty 0.5 '
        "--frequency-penalty -0.25"
    )
    args = parse(TREES[Where.MAGIC], split(line))
    assert (args.max_tokens, args.temperature, args.top_p, args.top_k, args.min_p) == (64, 0.7, 0.9, 40, 0.05)
    assert (args.repetition_penalty, args.seed, args.stop) == (1.1, 1, ["\n\n", "</a>"])
    assert (args.output, args.template, args.prompt, args.takes_prompt) == ("out", True, None, True)
    params = params_from(args)
    assert (params.min_tokens, params.presence_penalty, params.frequency_penalty) == (3, 0.5, -0.25)
    assert params.ignore_eos and not params_from(parse(TREES[Where.MAGIC], ["generate"])).ignore_eos


def test_a_backslash_in_a_stop_can_be_kept() -> None:
    args = parse(TREES[Where.SHELL], ["generate", "--model", "m", "--prompt", "p", "--stop", r"\\n\t\d"])
    assert args.stop == ["\\n\t\\d"]


@pytest.mark.parametrize("prompt", ["{x} $y %z", 'it\'s "quoted"', "- a list", "", "   ", "🙂 汉字"])
def test_a_shell_prompt_is_taken_word_for_word(prompt: str) -> None:
    assert parse(TREES[Where.SHELL], ["generate", "--model", "m", "--prompt", prompt]).prompt == prompt


def test_defaults_do_not_leak_between_lines() -> None:
    tree = TREES[Where.MAGIC]
    parse(tree, ["generate", "--stop", "a"])
    assert parse(tree, ["generate"]).stop == []


def test_parsing_and_completing_import_nothing_heavy() -> None:
    heavy = {"mlx", "mlx_lm", "ipyparallel", "numpy", "transformers", "zmq", "cryptography", "msgpack"}
    code = (
        "import sys; from mlxcel_nb.commands import parser, tree; from mlxcel_nb.commands.parser import Where;"
        "parser.parse(tree.build(Where.SHELL), ['net', 'ping', 'h:1']);"
        f"assert 'IPython' not in sys.modules; import mlxcel_nb.cli; print(sorted({heavy!r} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
