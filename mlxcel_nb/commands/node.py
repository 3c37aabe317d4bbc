"""`node`: one node of a cluster, from a file or from flags, with no notebook above it."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from mlxcel_nb.cluster.config import DEFAULT_CLUSTER, load_config
from mlxcel_nb.cluster.membership import Change, State
from mlxcel_nb.cluster.secret import Secrets
from mlxcel_nb.cluster.shape import parse_links
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.parser import UsageProblem
from mlxcel_nb.commands.platforms import missing_back_end
from mlxcel_nb.commands.renewal import renewed
from mlxcel_nb.display.reports import cipher_text, layers_text
from mlxcel_nb.display.view import note
from mlxcel_nb.launch.bare_plan import NodePlan, from_file, from_flags
from mlxcel_nb.util import log
from mlxcel_nb.util.cores import usable_cores
from mlxcel_nb.wire.fields import printable


def node(args: argparse.Namespace, context: Context) -> None:
    """Handler of `node`. Ctrl-C and SIGTERM are its ordinary ends; SIGHUP has it read its secrets again."""
    plan = _plan(args)
    links = parse_links(args.link, plan.members)
    log.configure(plan.node_id)
    from mlxcel_nb.launch import bare

    secrets = bare.secrets_of(plan, args.secret_file, args.previous_secret_file)
    places = bare.whereabouts(plan)
    console = context.console
    for host in places.unknown:
        console.remark(note(f"{host} is not known yet; it is asked for again at every attempt"))
    if args.bind is None and plan.unheard:
        console.remark(note("listens on loopback alone; give --bind for other hosts"))

    def read() -> Secrets:
        return bare.secrets_of(_with_secret_files(plan, args), args.secret_file, args.previous_secret_file)

    units = plan.entry.compute_units if plan.entry else 0
    bare.run(
        plan,
        secrets,
        places,
        suite=args.suite,
        threads=args.threads or units or usable_cores(),
        links=links,
        back_end=missing_back_end(),
        renew=lambda held: (held, "alone: there is no secret to read") if plan.alone else renewed(held, read),
        listening=lambda address, computes: f"listening on {address}: {_words(plan, args.suite, computes)}",
        changed=change_line,
        unseen=unseen_line,
        say=console.say,
    )
    console.remark(note("stopped"))


def _plan(args: argparse.Namespace) -> NodePlan:
    given = args.secret_file is not None
    if args.config is None:
        return from_flags(
            cluster=DEFAULT_CLUSTER if args.cluster is None else args.cluster,
            node_id=args.node_id,
            role=args.node_role,
            peers=args.peers,
            bind=args.bind,
            port_range=args.port_range,
            discover=args.discover,
            secret_given=given,
        )
    for option, value in (("--peers", args.peers), ("--cluster", args.cluster), ("--port-range", args.port_range)):
        if value:
            raise UsageProblem(f"{option} is in the cluster file already", advice=f"Leave {option} out.")
    return from_file(
        load_config(args.config),
        source=os.fspath(args.config),
        node_id=args.node_id,
        role=args.node_role,
        bind=args.bind,
        secret_given=given,
        discover=args.discover,
    )


def _with_secret_files(plan: NodePlan, args: argparse.Namespace) -> NodePlan:
    """`plan`, with the secret files that the cluster file names now; nothing else of it is read again."""
    if args.config is None:
        return plan
    config = load_config(args.config)
    return replace(plan, secret_file=config.secret_file, previous_secret_file=config.previous_secret_file)


def _words(plan: NodePlan, suite: str, computes: str) -> str:
    """Who this node is, on one line."""
    words = [f"node {plan.node_id}", plan.role]
    entry = plan.entry
    if entry is not None:
        words += [f"stage {entry.stage}, rank {entry.rank}"] if entry.stage is not None else []
        words += [f"layers {layers_text(entry.layers)}"] if entry.layers else []
        words += [entry.group] if entry.group else []
        words += ["spare"] if entry.spare else []
    words += [f"cluster {plan.cluster}", cipher_text(suite), computes]
    if plan.alone:
        words.append("alone: no cluster secret is read, and nobody can join")
    elif count := len(plan.peers) + len(plan.strangers):
        words.append(f"{count} peer{'s' if count > 1 else ''}")
    return ", ".join(words)


def change_line(change: Change) -> str | None:
    """What a user is told of a peer's change of state; nothing of steps between two states of one name."""
    state, before = change.state.shown, change.before.shown
    if state == before and not change.restarted:
        return None
    if change.restarted:
        return f"{change.node_id} is back, as a new process"
    if change.state is State.ALIVE:
        words = {State.UNSEEN: "alive", State.DEAD: "back"}.get(change.before, "alive again")
        return f"{change.node_id} is {words}"
    reason = printable(change.reason)
    return f"{change.node_id} is {state}{f': {reason}' if reason else ''}"


def unseen_line(peer: str, reason: str) -> str:
    """What a user is told of a peer that was never reached."""
    return f"{peer} is unseen: {printable(reason)}"
