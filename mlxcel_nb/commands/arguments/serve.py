"""Arguments of `serve`. Pure."""

from __future__ import annotations

import argparse

from mlxcel_nb.commands.arguments import generation, shared
from mlxcel_nb.commands.parser import Kind, Tree

PORT = 8000


def add(tree: Tree, magic: bool) -> None:
    detail = (
        "The cell returns at once; the kernel answers until `serve stop`."
        if magic
        else "Engines of its own hold the model until Ctrl-C."
    )
    serve = tree.leaf("serve", "answer OpenAI's clients over HTTP", "serve:serve", detail=detail)
    if magic:
        stop = "end the answers under way and stop listening"
        serve.add("action", nargs="?", choices=("stop",), metavar="stop", help=stop)
    else:
        generation.what_to_load(serve, positional=True)
    serve.add("--host", default="127.0.0.1", metavar="HOST", help="where to listen (default: this computer alone)")
    port = f"the port (default {PORT}); 0 takes a free one"
    serve.add("--port", type=shared.port, default=PORT, metavar="N", help=port)
    key = "callers must show this file's key; needed beyond this computer"
    serve.add("--api-key-file", metavar="FILE", completes=Kind.PATH, help=key)
    serve.add("--ssl-certfile", metavar="FILE", completes=Kind.PATH, help="serve HTTPS with this certificate, PEM")
    serve.add("--ssl-keyfile", metavar="FILE", completes=Kind.PATH, help="its private key, PEM, without a password")
    name = "what requests call the model; once for each name, the first is what answers say"
    serve.add("--served-model-name", type=_name, action="append", default=[], metavar="NAME", help=name)
    origin = "let web pages from there use it, as http://localhost:8888; repeatable"
    serve.add("--allow-origin", action="append", default=[], metavar="ORIGIN", help=origin)
    if magic:
        shared.on(serve)


def _name(text: str) -> str:
    """A name that requests can call the model by."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty; leave the option out for the model's own")
    if "," in text:
        raise argparse.ArgumentTypeError(f"{text!r} has a comma; give the option once for each name")
    if text != text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} begins or ends with a space, or has signs that cannot be shown")
    return text
