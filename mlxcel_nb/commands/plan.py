"""`plan`: which layouts of a model fit which nodes, how fast they are by estimate, and which one to take."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from mlxcel_nb.cluster.shape import LinkShape
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.model import fetch_meter
from mlxcel_nb.commands.parser import UsageProblem
from mlxcel_nb.display.plan import plan_dict, plan_view
from mlxcel_nb.display.view import View, note
from mlxcel_nb.errors import ClusterError
from mlxcel_nb.models import store
from mlxcel_nb.plan.adviser import advise
from mlxcel_nb.plan.estimate import Links, Load
from mlxcel_nb.plan.facts import ModelFacts
from mlxcel_nb.plan.nodes import Node, Speed
from mlxcel_nb.util.units import bytes_text, figure

LOCAL = LinkShape(latency_s=30e-6, bytes_per_s=2e9)
"""Between processes of a host, about what our encrypted links do there (docs/benchmarks.md)."""

NETWORK = LinkShape(latency_s=200e-6, bytes_per_s=125e6)
"""A gigabit Ethernet, where nothing else is said."""

CONTEXT, PROMPT = 4096, 512
"""Tokens, where no others are asked for."""

MEASURE_S = 60.0
"""For a measurement that takes two seconds on a machine with nothing else to do."""


def plan(args: argparse.Namespace, context: Context) -> int:
    """Handler of `plan`; exit status 1 when nothing fits."""
    with context.console.progress(f"Looking at {args.model}") as progress:
        nodes, notes = (args.nodes, []) if args.nodes else _nodes_here(context)
        facts = _facts(args, len(nodes), fetch_meter(progress))
        load = _load(args, facts)
        usual = None
        if not all(node.bandwidth and node.flops for node in nodes):
            progress.update(0, 0, "measuring this machine")
            usual = speed_here()
            what = f"{figure(usual.bandwidth / 1e9)} GB/s of memory, {figure(usual.flops / 1e9)} GFLOP/s"
            notes.append(f"Where no speed is given, this machine's is taken, measured just now: {what}.")
            usual = _shared(usual, args, len(nodes))
        if args.link is None and len({node.host for node in nodes}) > 1:
            notes.append(f"No --link is given; between hosts this one is taken: {NETWORK.words}.")
        links = Links(LOCAL, args.link or NETWORK)
        advice = advise(facts, nodes, load, links, usual)
        if getattr(args, "json", False):
            line = json.dumps(plan_dict(facts, nodes, load, links, usual, advice, notes))
            progress.finish(View(line, note(line).html))
        else:
            progress.finish(plan_view(facts, load, advice, notes))
    return 0 if advice.best else 1


def _nodes_here(context: Context) -> tuple[tuple[Node, ...], list[str]]:
    """Where none are given: the engines of this notebook's cluster, which share this machine, or the machine itself.

    Raises:
        UsageProblem: engines on other hosts, whose memory is not known here.
    """
    from mlxcel_nb.models.memory import room

    left = room().available
    try:
        cluster = context.session.get().cluster
    except ClusterError:
        return (Node("this machine", left, "here"),), [f"Planned for what this machine has free: {bytes_text(left)}."]
    engines = [node.node_id for node in cluster.nodes]
    if not all(node.address.is_loopback for node in cluster.nodes):
        raise UsageProblem("the engines are on several hosts", advice="Say what each has: --nodes 16GB,16GB.")
    each = left // len(engines)
    notes = [f"Planned for the {len(engines)} engines of {cluster.name}, which share {bytes_text(left)} that are free."]
    return tuple(Node(name, each, "here") for name in engines), notes


def _shared(speed: Speed, args: argparse.Namespace, count: int) -> Speed:
    """Engines of one machine share its memory's bandwidth and its cores; nodes that were listed are machines."""
    return speed if args.nodes else Speed(speed.bandwidth / count, speed.flops / count, speed.per_layer)


def _load(args: argparse.Namespace, facts: ModelFacts) -> Load:
    most = facts.context or args.context or CONTEXT
    if args.context and args.context > most:
        raise UsageProblem(f"a context of {args.context} tokens", advice=f"{facts.name} was made for up to {most}.")
    context = args.context or min(CONTEXT, most)
    if args.prompt and args.prompt > context:
        raise UsageProblem(f"a prompt of {args.prompt} tokens in a context of {context}", advice="Give a --context.")
    return Load(context, args.concurrency, args.prompt or min(PROMPT, context))


def _facts(args: argparse.Namespace, ranks: int, progress: store.Progress) -> ModelFacts:
    from mlxcel_nb.models import architecture, sizes
    from mlxcel_nb.models.safetensors_index import weight_files

    given = Path(args.model).expanduser()
    if given.is_dir() and not any(given.glob("*.safetensors")):
        given /= "config.json"
    entries = None
    if given.suffix == ".json":
        folder, config = given.parent, architecture.read_config_file(given, allow_code=args.allow_code)
    else:
        folder = store.resolve(args.model, allow_code=args.allow_code, progress=progress)
        config = architecture.read_config(folder, allow_code=args.allow_code)
        entries = weight_files(folder) if args.bits is None else None
    return sizes.gather(
        sizes.as_converted(config, args.bits) if args.bits is not None else config,
        name=args.model,
        folder=folder,
        entries=entries,
        dtype=args.dtype,
        ranks=ranks,
    )


def speed_here() -> Speed:
    """Measured in a process of its own, which gets the BLAS that engines have and leaves nothing behind.

    Raises:
        ClusterError: it ended without a figure.
    """
    words = [sys.executable, "-m", "mlxcel_nb.models.speed"]
    try:
        ran = subprocess.run(words, capture_output=True, text=True, timeout=MEASURE_S, check=True)
        return Speed(**json.loads(ran.stdout))
    except (subprocess.SubprocessError, ValueError, TypeError) as error:
        raise ClusterError(
            f"this machine's speed could not be measured: {type(error).__name__}",
            advice="Give it, as in --nodes 16GB@100GB/s@4TFLOPS.",
        ) from None
