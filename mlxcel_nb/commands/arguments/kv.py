"""Arguments of `kv`. Pure."""

from __future__ import annotations

from mlxcel_nb.commands.arguments import shared
from mlxcel_nb.commands.parser import Kind, Tree, Where


def add(tree: Tree) -> None:
    summary = "save what a model has read, and load it again" if tree.here is Where.MAGIC else "what has been saved"
    group = tree.group("kv", summary)
    detail = (
        "Of the last prompt and answer, and the conversation if there is one; or of the cell's text, which is read "
        "first if need be. One that is there under this name is replaced."
    )
    save = group.leaf(
        "save", "save keys and values to a file", "kv:save", where=Where.MAGIC, detail=detail, takes_prompt=True
    )
    save.add("name", metavar="NAME", completes=Kind.SAVED, help="what to save it as")
    save.add("--prompt", metavar="TEXT", help="a prompt to read and save, in place of a cell's text")
    shared.on(save)
    detail = (
        "The model has to be the same; how it is split does not matter. A prompt that begins alike is not read again, "
        "and chat goes on with the conversation that was saved."
    )
    load = group.leaf("load", "give keys and values back to the engines", "kv:load", where=Where.MAGIC, detail=detail)
    load.add("name", metavar="NAME", completes=Kind.SAVED, help="what it was saved as")
    shared.on(load)
    group.leaf("list", "what has been saved, and of which model", "kv:list_saved")
    remove = group.leaf("remove", "delete what has been saved", "kv:remove")
    remove.add("name", metavar="NAME", completes=Kind.SAVED, help="what it was saved as")
