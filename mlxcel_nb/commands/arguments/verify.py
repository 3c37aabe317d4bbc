"""Arguments of `verify`. Pure."""

from __future__ import annotations

import argparse

from mlxcel_nb.cluster.layout import Apart, Layout, parse_apart, parse_name, split_evenly
from mlxcel_nb.commands.arguments import shared
from mlxcel_nb.commands.arguments.generation import DTYPES
from mlxcel_nb.commands.parser import Kind, Tree, Where
from mlxcel_nb.errors import ConfigError

TOKENS = 64

OF_A_MODEL = ("prompt", "tokens", "dtype", "in_process", "allow_code", "vocab_parallel", "cluster")
"""Options that say nothing of the catalogue."""


def add(tree: Tree) -> None:
    detail = (
        "Each layout is fed the whole model's tokens, so that logits and layers can be compared, and then makes its "
        "own. The exit status is 0 when all are equal."
    )
    verify = tree.leaf(
        "verify", "does a model give the same answer split as whole, and where not", "verify:verify", detail=detail
    )
    model = "a known name, a folder, a GGUF file or a hub id"
    verify.add("--model", metavar="MODEL", completes=Kind.MODEL, help=model)
    verify.add("--catalogue", action="store_true", help="tiny random models of every architecture in place of a model")
    verify.add("--arch", action="append", default=[], metavar="NAME", help="of the catalogue these only; repeatable")
    usual = "as in tp2,pp2,tp2xpp2 (the default for a model); di:tp2+pp2 reads prompts in one and answers in another"
    verify.add("--layouts", type=layouts, metavar="LIST", help=usual)
    verify.add("--prompt", metavar="TEXT", help="what to read first, in place of a sentence of ours")
    verify.add("--tokens", type=shared.count, metavar="N", help=f"how many to make (default {TOKENS})")
    verify.add("--dtype", choices=DTYPES, help="auto (default) is float32 on CPUs and as stored elsewhere")
    here = "without engines: the parts one after the other in one process, ranks as threads"
    verify.add("--in-process", action="store_true", help=here)
    verify.add("--vocab-parallel", action="store_true", help="tensor ranks share the embedding and the head too")
    verify.add("--allow-code", action="store_true", help="let the model folder's own Python code run; else refused")
    verify.add("--json", action="store_true", help="print one JSON object")
    verify.add(
        "--cluster", where=Where.MAGIC, metavar="NAME", completes=Kind.CLUSTER, help="which, where there are several"
    )


def layouts(text: str) -> tuple[str, ...]:
    """Names as `Layout.name` spells them, each once, in the order given."""
    names = []
    for word in filter(None, (each.strip() for each in text.split(","))):
        try:
            apart = parse_apart(word)
            names.append(_spelled(word) if apart is None else Apart(*map(_spelled, apart)).name)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    if not names:
        raise argparse.ArgumentTypeError("there is no layout in it")
    return tuple(dict.fromkeys(names))


def _spelled(word: str) -> str:
    sizes = parse_name(word)
    return Layout(split_evenly(sizes.pp, sizes.pp), sizes.tp, sizes.ep).name
