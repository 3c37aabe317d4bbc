"""Arguments of `generate` and `chat` that say how tokens are chosen and when an answer ends. Pure."""

from __future__ import annotations

from mlxcel_nb.commands.arguments import shared
from mlxcel_nb.commands.parser import Kind, Tree


def add(leaf: Tree) -> None:
    """One option for each field of `SamplingParams` that a line of text can give."""
    leaf.add("--max-tokens", type=shared.whole, default=256, metavar="N", help="most tokens to make (default 256)")
    leaf.add("--min-tokens", type=shared.whole, default=0, metavar="N", help="do not end before so many (default 0)")
    leaf.add("--ignore-eos", action="store_true", help="go on past the model's end of text, up to --max-tokens")
    temperature = ("--temp", "--temperature")
    leaf.add(*temperature, dest="temperature", type=shared.real, default=0.0, metavar="T", help="0 is greedy (default)")
    leaf.add("--top-p", type=shared.real, default=1.0, metavar="P", help="keep the likeliest tokens up to this mass")
    leaf.add("--top-k", type=shared.whole, default=0, metavar="K", help="keep the K likeliest tokens; 0 keeps all")
    leaf.add("--min-p", type=shared.real, default=0.0, metavar="P", help="drop tokens under this share of the best")
    leaf.add("--repetition-penalty", type=shared.real, default=1.0, metavar="R", help="above 1, avoid recent tokens")
    presence = "-2 to 2; above 0, avoid what the answer has already"
    leaf.add("--presence-penalty", type=shared.real, default=0.0, metavar="R", help=presence)
    frequency = "-2 to 2; above 0, avoid what it has often"
    leaf.add("--frequency-penalty", type=shared.real, default=0.0, metavar="R", help=frequency)
    leaf.add("--seed", type=shared.whole, metavar="N", help="same seed, same text")
    stop = r"end before TEXT (\n and \t are understood); repeatable"
    leaf.add("--stop", type=shared.unescape, action="append", default=[], metavar="TEXT", help=stop)
    schema = "answer in JSON of this JSON schema: a file, or the schema itself"
    leaf.add("--json-schema", metavar="FILE|JSON", completes=Kind.PATH, help=schema)
    leaf.add("--json-object", action="store_true", help="answer with a JSON object of any kind")
    leaf.add("--regex", metavar="REGEX", help="answer with what matches this regular expression as a whole")
    grammar = "answer by the grammar in this file, written as for Lark, from `start` on"
    leaf.add("--grammar", metavar="FILE", completes=Kind.PATH, help=grammar)
