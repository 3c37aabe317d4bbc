"""`serve`: the HTTP API over a model that a shell's command loads for it, or over a notebook's own."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from mlxcel_nb.cluster.secret import read_secret_file
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.generate import cluster_for
from mlxcel_nb.commands.revival import Revival
from mlxcel_nb.commands.signals import Signals
from mlxcel_nb.display.reports import room_lines
from mlxcel_nb.display.view import note
from mlxcel_nb.errors import ClusterError, EngineLost, MlxcelError

if TYPE_CHECKING:
    from mlxcel_nb.serve.server import ApiServer

LOOK_S = 1.0
"""How often it is looked whether engines are lost."""

GONE_S = 2.0
"""When no request could be answered for so long, engines are given up. By then it is known how they ended."""

Remark = Callable[[str], None]


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
    context.console.say(f"{_where(server)}; %mlxcel serve stop ends it.")


def _from_shell(args: argparse.Namespace, context: Context) -> None:
    """Ctrl-C and SIGTERM are its ordinary ends; the loss of all engines is one once they cannot be started again."""
    console = context.console

    def remark(words: str) -> None:
        console.remark(note(words))

    server = _server(args).start()
    try:
        remark(f"listening on {server.url}; until the model is loaded, {server.url}/health says 503")
        _keep_serving(args, context, server, remark)
    finally:
        server.stop()
    remark("stopped")


def _keep_serving(args: argparse.Namespace, context: Context, server: ApiServer, remark: Remark) -> None:
    """Serve until the user ends it, with new engines when none is left that can answer.

    Raises:
        MlxcelError: of the first start. EngineLost: no more tries are left.
    """

    def first() -> None:
        assert server.served.report is not None
        for line in room_lines(server.served.report):
            remark(line)
        context.console.say(_where(server))

    revival = Revival()
    served_s, why = _serve(args, context, server, remark, first)
    while why:
        pause_s = revival.pause_s(served_s)
        if pause_s is None:
            cause = f"{why}; engines have been started again {revival.tries} times"
            raise EngineLost(cause, advice="Start the command again once the cause is mended.")
        remark(f"{why}; engines are started again" + (f" in {pause_s:g} s" if pause_s else ""))
        with Signals(server.hurry) as signals:
            if signals.wait(pause_s):
                return
        try:
            served_s, why = _serve(args, context, server, remark, lambda: remark("served again"))
        except MlxcelError as error:
            if not server.running:
                raise
            served_s, why = 0.0, f"engines did not start: {error}"


def _serve(
    args: argparse.Namespace, context: Context, server: ApiServer, remark: Remark, ready: Callable[[], None]
) -> tuple[float, str]:
    """Serve with engines of its own, which are stopped after the last answer, whatever ends it.

    Args:
        ready: called when requests are answered.

    Returns:
        How many seconds they could be asked, and why they no longer can; "" where the user ended it.
    """
    with ExitStack() as engines:
        held = engines.enter_context(cluster_for(args, context))
        with Signals(server.hurry) as signals:
            why, began = "", time.monotonic()
            try:
                server.served.cluster = held.cluster
                ready()
                why = _until(signals, server, remark)
            finally:
                if why:
                    server.leave_cluster(f"{why}; engines are started again")
                else:
                    server.stop()
                engines.close()  # here, where one who presses Ctrl-C again does not leave any of them behind
    return time.monotonic() - began, why


def _where(server: ApiServer) -> str:
    first, *others = server.served.names
    also = f" (also {', '.join(others)})" if others else ""
    return f"{first}{also} is served at {server.url}/v1"


def _server(args: argparse.Namespace) -> ApiServer:
    """A server that has its port; nothing is answered yet."""
    from mlxcel_nb.serve.served import Served
    from mlxcel_nb.serve.server import ApiServer

    key = read_secret_file(args.api_key_file) if args.api_key_file is not None else None
    return ApiServer(
        Served(names=tuple(dict.fromkeys(args.served_model_name))),
        host=args.host,
        port=args.port,
        key=key,
        certificate=args.ssl_certfile,
        private_key=args.ssl_keyfile,
        origins=args.allow_origin,
    )


def _until(signals: Signals, server: ApiServer, remark: Remark) -> str:
    """Wait for the end: "" where the user asks for it, else why no request can be answered any more."""
    from mlxcel_nb.serve.server import GRACE_S

    served = server.served
    since, before, told = time.monotonic(), served.lost, served.lost
    while not signals.wait(LOOK_S):
        if not server.running:
            raise ClusterError(f"the server at {server.url} has ended", advice="MLXCEL_NB_LOG=info says more.")
        lost, problem = served.lost, served.problem()
        if not problem:
            since = time.monotonic()
            for node in (before.keys() & lost.keys()) - told.keys():  # for a while, so how it ended is known
                remark(f"{node} is lost ({lost[node]}); requests go to the replicas that are left")
                told[node] = lost[node]
        elif time.monotonic() - since >= GONE_S:
            return problem
        before = lost
    remark(_stopping(server.in_flight, GRACE_S))
    return ""


def _stopping(requests: int, grace_s: float) -> str:
    """What happens at the first Ctrl-C."""
    if not requests:
        return "stopping"
    which = "1 request is" if requests == 1 else f"{requests} requests are"
    return f"stopping: {which} under way, for {grace_s:g} s at most; Ctrl-C again ends what is left at once"
