"""`plan`: which layouts of a model fit which nodes, how fast they are by estimate, and which one to take."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.model import fetch_meter
from mlxcel_nb.commands.parser import UsageProblem
from mlxcel_nb.commands.plan_nodes import Asked, asked_for
from mlxcel_nb.display.plan import places_view, plan_dict, plan_view
from mlxcel_nb.display.view import View, note, stack
from mlxcel_nb.errors import ClusterError
from mlxcel_nb.models import store
from mlxcel_nb.plan.adviser import Advice, advise
from mlxcel_nb.plan.estimate import ETHERNET, IN_HOST, Links, Load
from mlxcel_nb.plan.facts import ModelFacts
from mlxcel_nb.plan.nodes import Speed
from mlxcel_nb.util.units import bytes_text, figure

CONTEXT, PROMPT = 4096, 512
"""Tokens, where no others are asked for."""

MEASURE_S = 60.0
"""For a measurement that takes two seconds on a machine with nothing else to do."""


def plan(args: argparse.Namespace, context: Context) -> int:
    """Handler of `plan`; exit status 1 when nothing fits, or a cluster file's own layout does not."""
    with context.console.progress(f"Looking at {args.model}") as progress:
        wanted = asked_for(args, context)
        model = _model(args, wanted, fetch_meter(progress))
        load = _load(args, model.facts)
        usual = None
        if not all(node.bandwidth and node.flops for asked in wanted for node in asked.nodes):
            progress.update(0, 0, "measuring this machine")
            usual = speed_here()
        found = [_advise(asked, model, load, Links(IN_HOST, args.link or ETHERNET), usual, args) for asked in wanted]
        if getattr(args, "json", False):
            dicts = [told for _, told, _ in found]
            line = json.dumps(dicts[0] if len(dicts) == 1 else {"meshes": dicts})
            progress.finish(View(line, note(line).html))
        else:
            progress.finish(stack(*(view for _, _, view in found)))
    return 0 if all(advice.good for advice, _, _ in found) else 1


def _advise(
    asked: Asked, model: _Model, load: Load, links: Links, machine: Speed | None, args: argparse.Namespace
) -> tuple[Advice, dict[str, Any], View]:
    """Advice for some nodes, for programs and for people."""
    facts, notes = model.facts, [*asked.notes, *model.notes]
    usual = machine
    if machine is not None:
        what = f"{figure(machine.bandwidth / 1e9)} GB/s of memory, {figure(machine.flops / 1e9)} GFLOP/s"
        notes.append(f"Where no speed is given, this machine's is taken, measured just now: {what}.")
        usual = Speed(machine.bandwidth / asked.sharing, machine.flops / asked.sharing, machine.per_layer)
    if args.link is None and len({node.host for node in asked.nodes}) > 1:
        notes.append(f"No --link is given; between hosts this one is taken: {ETHERNET.words}.")
    advice = advise(facts, asked.nodes, load, links, usual, asked.given)
    if args.vocab_parallel and not any(each.layout.tp > 1 for each in advice.judged):
        notes.append("No layout here has tensor ranks that could share the vocabulary.")
    elif facts.vocab_parallel:
        notes.append("Tensor ranks share the embedding and the head too.")
    places = places_view(args.config, asked.places, asked.nodes) if asked.places else None
    told = plan_dict(facts, asked.nodes, load, links, usual, advice, notes, asked.mesh, model.dtype)
    return advice, told, plan_view(facts, load, advice, notes, asked.mesh, places, model.dtype)


def _load(args: argparse.Namespace, facts: ModelFacts) -> Load:
    most = facts.context or args.context or CONTEXT
    if args.context and args.context > most:
        raise UsageProblem(f"a context of {args.context} tokens", advice=f"{facts.name} was made for up to {most}.")
    context = args.context or min(CONTEXT, most)
    if args.prompt and args.prompt > context:
        raise UsageProblem(
            f"a prompt of {args.prompt} tokens in a context of {context}", advice="Give a longer --context."
        )
    return Load(context, args.concurrency, args.prompt or min(PROMPT, context))


@dataclass(frozen=True)
class _Model:
    """What is planned.

    Args:
        dtype: what `load` must be told to take as much; "" where it does so by itself.
        notes: what it would take otherwise.
    """

    facts: ModelFacts
    dtype: str = ""
    notes: tuple[str, ...] = ()


def _model(args: argparse.Namespace, wanted: Sequence[Asked], progress: store.Progress) -> _Model:
    """The model as `load` would take it there, or as it was asked for."""
    from mlxcel_nb.models import architecture, device, sizes
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
    config = sizes.as_converted(config, args.bits) if args.bits is not None else config

    where = wanted[0].device if all(asked.device for asked in wanted) else ""
    own = device.settled("auto", where)
    # Whoever asks for fewer bits wants to know what they save.
    dtype = "native" if args.dtype == "auto" and args.bits in (4, 8) else device.settled(args.dtype, where)
    ranks = max(len(asked.nodes) for asked in wanted)
    facts = sizes.gather(
        config,
        name=args.model,
        folder=folder,
        entries=entries,
        dtype=dtype,
        ranks=ranks,
        vocab_parallel=args.vocab_parallel,
    )
    if where and dtype == own:
        return _Model(facts)
    other = "float32" if where != device.GPU else "native"
    if other == dtype:  # of unknown nodes, asked for by name
        return _Model(facts, dtype)
    bytes_then = sizes.weight_bytes(config, folder, entries, other)
    if bytes_then == facts.weights:
        return _Model(facts)
    more = bytes_then - facts.weights
    what = f"{bytes_text(abs(more))} of weights {'more' if more > 0 else 'less'}"
    if where:
        note = f"Without --dtype {dtype}, load takes {other} there: {what}."
    else:
        note = f"On a processor, load takes float32 unless told otherwise: {what}. Plan that with --dtype float32."
    return _Model(facts, dtype, (note,))


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
