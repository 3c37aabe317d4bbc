"""`serve`: the HTTP API over a model that a shell's command loads for it, or over a notebook's own."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from mlxcel_nb.cluster.secret import read_secret_file
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.generate import cluster_for
from mlxcel_nb.display.view import note
from mlxcel_nb.errors import ClusterError

if TYPE_CHECKING:
    from mlxcel_nb.serve.server import ApiServer

LOOK_S = 1.0
"""How often it is looked whether engines are lost."""


def serve(args: argparse.Namespace, context: Context) -> None:
    """Handler of `serve`."""
    if hasattr(args, "model"):
        _from_shell(args, context)
    elif args.action == "stop":
        context.console.say(f"{context.session.stop_serving(args.cluster)} is closed.")
    else:
        _from_notebook(args, context)


def _from_notebook(args: argparse.Namespace, context: Context) -> None:
    held = context.session.get(args.cluster)
    held.check_model()
    context.session.check_not_served(held)
    server = _server(args)
    server.served.cluster = held.cluster
    context.session.serve(held, server.start())
    names = ", ".join(server.served.names)
    context.console.say(f"{names} is served at {server.url}/v1; %mlxcel serve stop ends it.")


def _from_shell(args: argparse.Namespace, context: Context) -> None:
    """Ctrl-C and SIGTERM are its ordinary ends: answers under way have a few seconds, then engines are stopped."""
    console = context.console
    server = _server(args).start()
    try:
        console.remark(note(f"listening on {server.url}; until the model is loaded, {server.url}/health says 503"))
        with cluster_for(args, context) as held:
            server.served.cluster = held.cluster
            try:
                with _asked_to_stop() as stop:
                    names = ", ".join(server.served.names)
                    console.say(f"{names} is served at {server.url}/v1")
                    _until(stop, server, lambda words: console.remark(note(words)))
            finally:
                server.stop()
    finally:
        server.stop()
    console.remark(note("stopped"))


def _server(args: argparse.Namespace) -> ApiServer:
    """A server that has its port; nothing is answered yet."""
    from mlxcel_nb.serve.served import Served
    from mlxcel_nb.serve.server import ApiServer

    key = read_secret_file(args.api_key_file) if args.api_key_file is not None else None
    return ApiServer(
        Served(names=args.served_model_name),
        host=args.host,
        port=args.port,
        key=key,
        certificate=args.ssl_certfile,
        private_key=args.ssl_keyfile,
        origins=args.allow_origin,
    )


@contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set. A second one has its usual effect: an end at once."""
    stop = threading.Event()
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def asked(_signum: int, _frame: FrameType | None) -> None:
        stop.set()
        for signum, handler in before.items():
            signal.signal(signum, handler)

    try:
        for signum in before:
            signal.signal(signum, asked)
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _until(stop: threading.Event, server: ApiServer, remark: Callable[[str], None]) -> None:
    """Wait for the end, and say once what happens to the engines: the server goes on and tells its callers."""
    known = None
    while not stop.wait(LOOK_S):
        if not server.running:
            raise ClusterError(f"the server at {server.url} has ended", advice="MLXCEL_NB_LOG=info says more.")
        if (problem := server.served.problem()) != known:
            known = problem
            remark(f"not served for now: {problem}" if problem else "served again")
