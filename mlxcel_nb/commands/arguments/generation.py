"""Arguments of `load`, `unload`, `generate` and `chat`. Pure."""

from __future__ import annotations

from mlxcel_nb.cluster.collectives import COLLECTIVES, OWN
from mlxcel_nb.cluster.roles import AUTO, PREFILL_FROM
from mlxcel_nb.commands.arguments import sampling, shared
from mlxcel_nb.commands.parser import Kind, Tree, Where
from mlxcel_nb.scheduling.replicas import POLICIES, PREFIX_AWARE

TRANSFERS = (AUTO, "plain", "lz4", "int8", "int4")
"""What `client.transfers` takes, which imports much."""

DTYPES = ("auto", "native", "float32", "float16", "bfloat16")
"""What `models.loading` takes, which imports MLX."""


def add_loading(tree: Tree) -> None:
    load = tree.leaf("load", "split a model over the engines", "load:load", where=Where.MAGIC)
    what_to_load(load, positional=True)
    shared.on(load)
    shared.on(tree.leaf("unload", "free the model on every engine", "load:unload", where=Where.MAGIC))


def add_generation(tree: Tree, magic: bool) -> None:
    detail = (
        "The cell's text is the prompt, word for word." if magic else "The text goes to standard output as it comes."
    )
    generate = tree.leaf("generate", "complete a prompt", "generate:generate", detail=detail, takes_prompt=True)
    about = "the prompt, in place of a cell's text" if magic else "the prompt"
    generate.add("--prompt", metavar="TEXT", help=about if magic else f"{about}; - reads standard input")
    file = "take the prompt from this file, less a last line end"
    generate.add("--prompt-file", metavar="FILE", completes=Kind.PATH, help=file)
    _request(generate, magic)
    generate.add("--json", where=Where.SHELL, action="store_true", help="print one JSON object instead of text")

    detail = "Earlier turns are kept until --reset." if magic else "Reads lines until end of file; /reset starts over."
    chat = tree.leaf("chat", "talk with an instruction-tuned model", "chat:chat", detail=detail, takes_prompt=True)
    about = "what to say, in place of a cell's text" if magic else "what to say; ends after the answer"
    chat.add("--prompt", metavar="TEXT", help=about)
    chat.add("--system", metavar="TEXT", help="system message; a new one starts a new conversation")
    chat.add("--reset", where=Where.MAGIC, action="store_true", help="forget the conversation first")
    _request(chat, magic)


def _request(leaf: Tree, magic: bool) -> None:
    if not magic:
        what_to_load(leaf, positional=False)
    sampling.add(leaf)
    keep = "keep the result in this variable"
    leaf.add("-o", "--output", where=Where.MAGIC, metavar="NAME", completes=Kind.VARIABLE, help=keep)
    holes = "put variables in for {name} and $name; {{ and $$ stand for themselves"
    leaf.add("--template", where=Where.MAGIC, action="store_true", help=holes)
    if magic:
        shared.on(leaf)


def what_to_load(leaf: Tree, *, positional: bool) -> None:
    """A model, and how it is split: also for `serve`."""
    about = "a known name, a folder, a GGUF file or a hub id"
    if positional:
        leaf.add("model", metavar="MODEL", completes=Kind.MODEL, help=about)
    else:
        leaf.add("--model", metavar="MODEL", required=True, completes=Kind.MODEL, help=about)
    leaf.add("--tp", type=shared.count, default=1, metavar="N", help="tensor-parallel ranks a stage (default 1)")
    leaf.add("--pp", type=shared.count, default=1, metavar="N", help="pipeline stages (default 1)")
    leaf.add("--ep", type=shared.count, default=1, metavar="N", help="expert-parallel ranks (default 1)")
    copies = "data-parallel replicas, each split so, that share requests (default 1)"
    leaf.add("--dp", type=shared.count, default=1, metavar="N", help=copies)
    leaf.add(
        "--prefill", type=shared.number, default=0, metavar="N", help="groups of engines that read prompts for others"
    )
    leaf.add("--decode", type=shared.number, default=0, metavar="N", help="groups that go on with what those have read")
    split = "how each of them is split, as in tp2 or 0-9,10-29 (default: as --tp and --pp say)"
    leaf.add("--prefill-layout", metavar="LAYOUT", help=split)
    leaf.add("--decode-layout", metavar="LAYOUT", help=split)
    travels = "how keys and values travel: auto (default) measures and takes plain or lz4; int8 and int4 round"
    leaf.add("--kv-transfer", choices=TRANSFERS, default="auto", help=travels)
    shorter = "prompts with fewer tokens to read are read where they are answered (default %(default)s)"
    leaf.add("--prefill-from", type=shared.number, default=PREFILL_FROM, metavar="N", help=shorter)
    chosen = "how one of several copies is chosen for a request (default %(default)s)"
    leaf.add("--route", choices=POLICIES, default=PREFIX_AWARE, help=chosen)
    groups = "groups of requests that keep the stages at work (default: one a stage)"
    leaf.add("--micro-batches", type=shared.count, default=0, metavar="M", help=groups)
    leaf.add("--layers", metavar="A-B,...", help='layers of each stage by hand, as in "0-9,10-29"')
    leaf.add(
        "--dtype", choices=DTYPES, default="auto", help="auto (default) is float32 on CPUs and as stored elsewhere"
    )
    sums = "who adds partial sums up: own (default), or MLX's groups, which are UNENCRYPTED"
    leaf.add("--collectives", choices=COLLECTIVES, default=OWN, help=sums)
    leaf.add("--vocab-parallel", action="store_true", help="tensor ranks share the embedding and the head too")
    leaf.add("--allow-code", action="store_true", help="let the model folder's own Python code run; else it is refused")
