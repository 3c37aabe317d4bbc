"""`chat`: a conversation that lasts over cells, or over lines in a terminal."""

from __future__ import annotations

import argparse
import sys

from mlxcel_nb.commands import prompts
from mlxcel_nb.commands.dispatch import INTERRUPTED, Context
from mlxcel_nb.commands.generate import answer, check_output, cluster_for, filled, kept, params_from, store
from mlxcel_nb.commands.parser import UsageProblem
from mlxcel_nb.commands.session import Held
from mlxcel_nb.models.params import SamplingParams


def chat(args: argparse.Namespace, context: Context) -> int:
    """Handler of `chat`."""
    params = params_from(args)
    check_output(args)
    text = prompts.choose(args.prompt, context.prompt)
    from_shell = hasattr(args, "model")
    with cluster_for(args, context) as held:
        talk = held.conversation
        if getattr(args, "reset", False):
            talk.reset()
        if args.system is not None:
            talk.instruct(filled(args.system, args, context))
        if text is not None:
            return _turn(filled(text, args, context), params, held, args, context)
        if from_shell:
            return _converse(params, held, args, context)
    if not getattr(args, "reset", False) and args.system is None:
        raise UsageProblem("there is nothing to say", advice="Write it under a first line of %%mlxcel chat.")
    context.console.say("The conversation starts over.")
    return 0


def _turn(text: str, params: SamplingParams, held: Held, args: argparse.Namespace, context: Context) -> int:
    stream = held.cluster.stream(None, params, messages=held.conversation.ask(text))
    with kept(stream, args, context):
        completion, interrupted = answer(stream, context.console)
    held.conversation.keep(text, completion.text)
    store(completion, args, context)
    return INTERRUPTED if interrupted else 0


def _converse(params: SamplingParams, held: Held, args: argparse.Namespace, context: Context) -> int:
    """Line by line until the end of input; stopping an answer does not end the talk, stopping at the prompt does."""
    interactive = sys.stdin.isatty()
    while True:
        if interactive:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return 0
        text = line.rstrip("\n")
        if text == "/reset":
            held.conversation.reset()
        elif text.strip():
            _turn(text, params, held, args, context)
