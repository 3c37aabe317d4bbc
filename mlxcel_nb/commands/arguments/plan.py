"""Arguments of `plan`. Pure."""

from __future__ import annotations

import argparse

from mlxcel_nb.commands.arguments import shared
from mlxcel_nb.commands.arguments.generation import DTYPES
from mlxcel_nb.commands.parser import Kind, Tree
from mlxcel_nb.errors import ConfigError
from mlxcel_nb.plan.nodes import Node, parse_nodes


def add(tree: Tree) -> None:
    detail = (
        "Sizes are counted from the model as it would be built; a config.json alone is enough, no weight is read and "
        "no engine starts. Times are estimates."
    )
    plan = tree.leaf("plan", "which layouts fit which nodes, and which to take", "plan:plan", detail=detail)
    about = "a known name, a folder, a GGUF file, a hub id or a config.json"
    plan.add("model", metavar="MODEL", completes=Kind.MODEL, help=about)
    given = "memory of each, as in 16GB,16GB,8GB; 2x24GB on one host; 16GB@100GB/s@4TFLOPS (default: what runs here)"
    plan.add("--nodes", type=nodes, metavar="LIST", help=given)
    written = "nodes, their memory, roles and places out of a cluster file, whose own layout is judged too"
    plan.add("--config", metavar="FILE", completes=Kind.PATH, help=written)
    plan.add(
        "--context", type=shared.count, metavar="N", help="tokens of a sequence (default 4096, or the model's most)"
    )
    plan.add("--concurrency", type=shared.count, default=1, metavar="N", help="sequences at once (default 1)")
    plan.add("--prompt", type=shared.count, metavar="N", help="tokens read before the first is made (default 512)")
    plan.add("--link", type=shared.shape, metavar="SHAPE", help="between hosts, as in 1Gbit,2ms (default 1Gbit,200us)")
    plan.add("--dtype", choices=DTYPES, default="auto", help="as load takes it (default auto: float32 on a CPU)")
    plan.add("--bits", type=int, choices=(4, 8, 16), help="as if converted to so many bits a weight first")
    plan.add("--vocab-parallel", action="store_true", help="tensor ranks share the embedding and the head too")
    plan.add("--allow-code", action="store_true", help="let the model folder's own Python code run; else it is refused")
    plan.add("--json", action="store_true", help="print one JSON object")


def nodes(text: str) -> tuple[Node, ...]:
    try:
        return parse_nodes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
