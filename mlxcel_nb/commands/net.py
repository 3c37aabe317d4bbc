"""`net listen` and `net ping`: the data plane between two hosts, without a cluster."""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import queue
import signal
from typing import Any

from mlxcel_nb.cluster.secret import Secrets, resolve_secrets
from mlxcel_nb.commands.console import Console
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.renewal import renewed
from mlxcel_nb.display.view import View, note
from mlxcel_nb.errors import MlxcelError, PeerLost, Refused, SecretError, StepTimeout
from mlxcel_nb.net.control.control_link import LOOK
from mlxcel_nb.net.links.listener import Listener
from mlxcel_nb.net.measuring import ping as logic
from mlxcel_nb.util.hangups import HangUp
from mlxcel_nb.util.interrupts import handed_to
from mlxcel_nb.util.loop import LoopThread

PING_S = 60.0
"""For one ping and its share of the handshake; each step inside has a shorter deadline of its own."""

STOP_S = 0.8
"""For all of it to end after Ctrl-C, the pong that is on its way included."""


def listen(args: argparse.Namespace, context: Context) -> None:
    """Handler of `net listen`. Ctrl-C and SIGTERM are its ordinary ends, SIGHUP has it read the secret again; no
    stranger can end it.

    Raises:
        Refused: at the end, when peers came that were set up differently and no other.
    """
    visits = asyncio.run(_until_signal(args, context.console))
    context.console.remark(note("stopped"))
    if visits.in_vain:
        raise Refused(f"nobody was let in; refused were {visits}", advice="Give both sides the same.")


async def _until_signal(args: argparse.Namespace, console: Console) -> logic.Visits:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    held = _secrets(args)
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop.set)

    def ready(listener: Listener) -> None:
        def again() -> None:
            nonlocal held
            held, line = renewed(held, lambda: _secrets(args))
            listener.use(held)
            console.say(line)

        hang_up = HangUp(lambda: loop.call_soon(again), stop.set)  # by then it has said where it listens
        loop.add_signal_handler(signal.SIGHUP, hang_up)
        hang_up.catch_up()

    return await logic.listen(
        args.bind,
        held,
        echo=console.say,
        warn=lambda line: console.remark(note(f"refused: {line}")),
        ready=ready,
        stop=stop,
        **_options(args),
    )


def ping(args: argparse.Namespace, context: Context) -> None:
    """Handler of `net ping`; in a notebook a loop runs already, so it gets one of its own."""
    secrets = _secrets(args)
    loop = LoopThread("mlxcel-ping")
    news: queue.SimpleQueue[str] = queue.SimpleQueue()
    try:
        stop, patience = asyncio.Event(), PING_S + args.count * logic.PONG_S
        with handed_to(lambda: news.put("interrupt")):
            pinging = loop.spawn(
                logic.ping(args.address, secrets, count=args.count, size=args.size, stop=stop, **_options(args))
            )
            pinging.add_done_callback(lambda _: news.put("done"))
            try:
                heard = news.get(timeout=patience)
            except queue.Empty:
                raise StepTimeout(f"waited {patience:g} s for pongs of {args.address}") from None
            if heard == "interrupt":  # what was measured by now is worth showing
                loop.soon(stop.set)
                with contextlib.suppress(MlxcelError, TimeoutError, concurrent.futures.CancelledError):
                    _show(pinging.result(STOP_S), args, context)
                raise KeyboardInterrupt
        report = pinging.result()
        if report.lost is not None:  # what was measured before is worth showing here too
            _show(report, args, context)
            raise report.lost
    except PeerLost as silent:
        if args.address.rpartition(":")[0] in silent.cause:
            raise
        advice = silent.advice or LOOK
        raise PeerLost(f"{silent.cause}, at {args.address}", node=silent.node, advice=advice) from None
    finally:
        loop.close()
    _show(report, args, context)


def _show(report: logic.PingReport, args: argparse.Namespace, context: Context) -> None:
    as_json = getattr(args, "json", False)
    for line in [json.dumps(report.to_dict())] if as_json else report.lines():
        context.console.show(View(line, note(line).html))


def _secrets(args: argparse.Namespace) -> Secrets:
    secrets = resolve_secrets(file=args.secret_file, previous_file=args.previous_secret_file)
    if secrets is None:
        raise SecretError("no cluster secret was given", advice="Use --secret-file, or MLXCEL_CLUSTER_SECRET_FILE.")
    return secrets


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "cluster": args.cluster,
        "node_id": args.node_id,
        "suite": args.suite,
        "rekey_every": args.rekey_every,
        "shape": args.link,
    }
