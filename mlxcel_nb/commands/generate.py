"""`generate`: one prompt, one answer, in a cell or a terminal. `answer` is shared with `chat`."""

from __future__ import annotations

import argparse
import json
import keyword
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxcel_nb.client.report import Completion
from mlxcel_nb.commands import prompts
from mlxcel_nb.commands.cluster import starting
from mlxcel_nb.commands.console import Console
from mlxcel_nb.commands.dispatch import INTERRUPTED, Context
from mlxcel_nb.commands.load import load_model, plan_model
from mlxcel_nb.commands.parser import UsageProblem
from mlxcel_nb.commands.session import Held
from mlxcel_nb.display.reports import footer
from mlxcel_nb.display.streaming import show_stream
from mlxcel_nb.display.view import View
from mlxcel_nb.errors import ConfigError, MlxcelError
from mlxcel_nb.models.params import SamplingParams


def generate(args: argparse.Namespace, context: Context) -> int:
    """Handler of `generate`."""
    params = params_from(args)
    check_output(args)
    prompt = prompts.choose(_option(args), context.prompt)
    if prompt is None:
        where = "Give --prompt TEXT, --prompt - or --prompt-file FILE."
        if not _from_shell(args):
            where = "Write it under a first line of %%mlxcel generate, or give --prompt."
        raise UsageProblem("there is no prompt", advice=where)
    prompt = filled(prompt, args, context)
    with cluster_for(args, context) as held:
        stream = held.cluster.stream(prompt, params)
        as_json = getattr(args, "json", False)
        with kept(stream, args, context):
            completion, interrupted = answer(stream, context.console, silent=as_json)
    if as_json:
        context.console.show(View(json.dumps(completion.to_dict(), ensure_ascii=False), ""))
    store(completion, args, context)
    return INTERRUPTED if interrupted else 0


def answer(stream: Any, console: Console, *, silent: bool = False) -> tuple[Completion, bool]:
    """Show a stream and its footer; returns the completion and whether the user interrupted it."""
    if silent:
        return show_stream(stream, len)
    try:
        completion, interrupted = show_stream(stream, console.write, notice=console.reading)
    finally:
        console.end_text()
    console.remark(footer(completion))
    return completion, interrupted


@contextmanager
def cluster_for(args: argparse.Namespace, context: Context) -> Iterator[Held]:
    """The notebook's cluster, or, from a shell, one that lives as long as the command."""
    if not _from_shell(args):
        held = context.session.get(args.cluster)
        held.check_model()
        yield held
        return
    try:
        engines = plan_model(args, context.console).engines
        with context.console.progress(starting(engines)) as progress:
            held = context.session.start(lambda doing: progress.update(0, 0, doing), n=engines)
        load_model(held, args, context.console, quiet=True)
        yield held
    finally:
        context.session.stop_all()


def params_from(args: argparse.Namespace) -> SamplingParams:
    """The sampling options as checked parameters; a schema and a grammar are read from their files.

    A form that no answer can have is refused here: in a shell no engine has been started yet.
    """
    params = SamplingParams(
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
        json_schema=_schema(args.json_schema),
        json_object=args.json_object,
        regex=args.regex,
        grammar=None if args.grammar is None else _file(args.grammar),
    )
    if params.constrained:
        from mlxcel_nb.models.constraints import check

        check(params)
    return params


def _schema(given: str | None) -> str | None:
    """A schema that an option names: itself, where it is a JSON map, or the text of a file."""
    return given if given is None or given.lstrip().startswith("{") else _file(given)


def filled(text: str, args: argparse.Namespace, context: Context) -> str:
    """`text` with variables put in, if `--template` asked for it."""
    return prompts.interpolate(text, context.names) if getattr(args, "template", False) else text


def check_output(args: argparse.Namespace) -> None:
    """Refuse a name that `-o` cannot store under, before any token is made."""
    name = getattr(args, "output", None)
    if name is not None and (not name.isidentifier() or keyword.iskeyword(name)):
        raise UsageProblem(f"{name!r} is not a variable's name", advice="As in: -o answer")


def store(completion: Completion, args: argparse.Namespace, context: Context) -> None:
    """Keep the completion in the variable that `-o` named."""
    if name := getattr(args, "output", None):
        context.names[name] = completion


@contextmanager
def kept(stream: Any, args: argparse.Namespace, context: Context) -> Iterator[None]:
    """When the answer fails, what there is of it is kept as well, with the finish reason "error"."""
    try:
        yield
    except MlxcelError:
        if stream.completion is not None:
            store(stream.completion, args, context)
        raise


def _from_shell(args: argparse.Namespace) -> bool:
    """A shell's commands bring their model along; a notebook's find it loaded."""
    return hasattr(args, "model")


def _option(args: argparse.Namespace) -> str | None:
    """The prompt that the options give. It need not be an argument, which every user of the machine can read."""
    if args.prompt_file is not None:
        if args.prompt is not None:
            raise UsageProblem("there is a --prompt and a --prompt-file", advice="Give one of the two.")
        return _file(args.prompt_file)
    if args.prompt == "-" and _from_shell(args):
        return _text("standard input", sys.stdin.buffer.read)
    prompt: str | None = args.prompt
    return prompt


def _file(name: str) -> str:
    return _text(name, lambda: Path(name).expanduser().read_bytes())


def _text(where: str, read: Callable[[], bytes]) -> str:
    """A whole file, less a last line end, as with a cell."""
    try:
        return read().decode().removesuffix("\n")
    except OSError as problem:
        raise ConfigError(f"{where}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where} is not UTF-8 text") from None
