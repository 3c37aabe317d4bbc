"""The whole command tree, one for `%mlxcel` and `%%mlxcel` and one for `mlxcel-nb`, from the same lines. Pure."""

from __future__ import annotations

from mlxcel_nb.commands.arguments import (
    cluster,
    config,
    discover,
    generation,
    kv,
    model,
    net,
    node,
    plan,
    serve,
    verify,
)
from mlxcel_nb.commands.parser import Kind, Parser, Tree, Where


def build(here: Where) -> Parser:
    """The whole tree as seen from a notebook (`Where.MAGIC`) or from a shell (`Where.SHELL`)."""
    magic = here is Where.MAGIC
    root = Parser(
        prog="%mlxcel" if magic else "mlxcel-nb",
        description=f"Distributed LLM inference from a {'notebook' if magic else 'shell'}: engines share a model, "
        f"tokens stream into the {'cell' if magic else 'terminal'}.",
    )
    root.set_defaults(handler=None, takes_prompt=False)
    tree = Tree(root, here)
    tree.add("--version", where=Where.SHELL, action="store_true", help="print the version and exit")
    cluster.add(tree)
    generation.add_loading(tree)
    generation.add_generation(tree, magic)
    serve.add(tree, magic)
    model.add(tree)
    kv.add(tree)
    plan.add(tree)
    verify.add(tree)
    config.add(tree)
    net.add(tree)
    node.add(tree)
    discover.add(tree)
    secret = tree.group("secret", "cluster secrets")
    new = secret.leaf("new", "write a new random secret to a file", "secret:new", detail="Mode 0600; never overwrites.")
    new.add("file", metavar="FILE", completes=Kind.PATH, help="the file to create")
    tree.leaf(
        "demo",
        "two engines, one real model, one streamed answer",
        "demo:demo",
        where=Where.SHELL,
        detail="Leaves nothing running.",
    )
    tree.leaf("version", "versions of this package and of what it stands on", "version:version")
    return root
