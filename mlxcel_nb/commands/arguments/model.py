"""Arguments of `model`. Pure."""

from __future__ import annotations

from mlxcel_nb.commands.parser import Kind, Tree


def add(tree: Tree) -> None:
    group = tree.group("model", "fetch and look at models")
    fetch = group.leaf("fetch", "download a known model into the cache", "model:fetch")
    fetch.add("model", metavar="NAME", completes=Kind.MODEL, help="a known name, or a hub id")
    group.leaf("list", "known and fetched models", "model:list_models")
    info = group.leaf("info", "what a model is made of", "model:info")
    info.add("model", metavar="MODEL", completes=Kind.MODEL, help="a known name, a folder or a GGUF file")
    rm = group.leaf("rm", "remove a model from the cache", "model:rm")
    rm.add("model", metavar="NAME", completes=Kind.CACHED, help="the model to remove")
