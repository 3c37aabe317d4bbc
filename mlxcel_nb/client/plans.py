"""A model found on this host, and how it will be split over which engines: what can be refused before one starts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxcel_nb.cluster.layout import Layout, check_replicas, make_layout, parse_name, replicated
from mlxcel_nb.cluster.roles import DECODE, HYBRID, PREFILL
from mlxcel_nb.errors import ConfigError
from mlxcel_nb.models.folder import check_tokenizer, read_json
from mlxcel_nb.models.info import model_info
from mlxcel_nb.models.store import resolve
from mlxcel_nb.plan.experts import check_ep
from mlxcel_nb.plan.shards import check_tp
from mlxcel_nb.scheduling.pipeline import check_micro_batches
from mlxcel_nb.util.cores import usable_cores

MIN_MOST_ENGINES = 16
"""So many engines are allowed on any machine; beyond, four a core."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Engines that hold a whole model together.

    Args:
        role: "prefill" reads prompts for others, "decode" goes on with what they have read, "hybrid" does both.
    """

    role: str
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model found on this host, and how it will be split.

    Args:
        groups: whole copies, each on engines of its own.
        context: most positions the model was made for, 0 where it does not say.
        micro_batches: as asked for; 0 chooses.
    """

    model: str
    path: Path
    groups: tuple[Group, ...]
    context: int = 0
    micro_batches: int = 0

    @property
    def layout(self) -> Layout:
        """Of those that answer."""
        return next(group.layout for group in self.groups if group.role != PREFILL)

    @property
    def replicas(self) -> int:
        """Copies that answer."""
        return sum(group.role != PREFILL for group in self.groups)

    @property
    def engines(self) -> int:
        return sum(group.layout.size for group in self.groups)

    @property
    def name(self) -> str:
        """Of the whole: dp2xtp2, or "prefill tp2 + 2 decode"."""
        if not any(group.role == PREFILL for group in self.groups):
            return replicated(self.layout.name, self.replicas)
        counts = Counter((group.role, group.layout.name) for group in self.groups)
        return " + ".join(
            " ".join([*([str(count)] if count > 1 else []), role, *([name] if size_of(name) > 1 else [])])
            for (role, name), count in counts.items()
        )


def size_of(name: str) -> int:
    """Engines of a layout with this name."""
    return parse_name(name).members


def prepare(
    model: str,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    layers: str | None = None,
    dp: int = 1,
    prefill: int = 0,
    decode: int = 0,
    prefill_layout: str | None = None,
    decode_layout: str | None = None,
    micro_batches: int = 0,
    allow_code: bool = False,
    progress: Any = None,
) -> Plan:
    """Everything that can be refused without an engine: the model's files, the layout, the split.

    Args:
        prefill, decode: groups that read prompts, and groups that go on with what those have read; both or none.
        prefill_layout, decode_layout: of each, as "tp2", or the layers of its stages, as "0-9,10-29"; as `tp`, `pp` and
            so on say where not given.
        progress: of a fetch, as `models.store.resolve` takes it.

    Raises:
        ConfigError: a split that cannot work. ModelError: a model that is not there or not whole.
    """
    path = resolve(model, allow_code=allow_code, progress=progress)
    facts = model_info(path)
    check_replicas(dp)
    check_roles(prefill, decode, dp, prefill_layout, decode_layout)
    layout = make_layout(facts.layers, tp=tp, pp=pp, ep=ep, layers=layers)
    config = read_json(path / "config.json")

    def named(name: str | None) -> Layout:
        if name is None:
            return layout
        if name != "single" and ("-" in name or "," in name):  # its layers, stage by stage
            return make_layout(facts.layers, pp=name.count(",") + 1, layers=name)
        sizes = parse_name(name)
        return make_layout(facts.layers, tp=sizes.tp, pp=sizes.pp, ep=sizes.ep)

    groups = (
        tuple(Group(role=PREFILL, layout=named(prefill_layout)) for _ in range(prefill))
        + tuple(Group(role=DECODE, layout=named(decode_layout)) for _ in range(decode))
        + tuple(Group(role=HYBRID, layout=layout) for _ in range(0 if prefill else dp))
    )
    for group in groups:
        check_micro_batches(micro_batches, group.layout.pp)
        check_tp(config, group.layout.tp)
        check_ep(config, group.layout.ep)
    check_tokenizer(path)
    return Plan(model=model, path=path, groups=groups, context=facts.context, micro_batches=micro_batches)


def check_roles(prefill: int, decode: int, dp: int, prefill_layout: str | None, decode_layout: str | None) -> None:
    """Refuse groups that cannot work together.

    Raises:
        ConfigError: one of the two is missing, or replicas are asked for as well.
    """
    for number, role in ((prefill, PREFILL), (decode, DECODE)):
        if type(number) is not int or number < 0:
            raise ConfigError(f"{number} {role} groups", advice="Ask for a whole number of them.")
    if bool(prefill) != bool(decode):
        there, missing = (PREFILL, DECODE) if prefill else (DECODE, PREFILL)
        raise ConfigError(
            f"there are {there} groups, but no {missing} group",
            advice="Give both: --prefill 1 --decode 1. Without them every group reads prompts and answers.",
        )
    if prefill and dp > 1:
        raise ConfigError(
            f"{dp} replicas beside prefill and decode groups", advice="Leave dp out: --decode says how many answer."
        )
    if not prefill and (prefill_layout or decode_layout):
        raise ConfigError(
            "a layout of prefill or decode groups, and there are none", advice="Give --prefill 1 --decode 1 too."
        )


def check_count(n: int) -> None:
    """Refuse a number of engines that is none, or so large that it must be a slip.

    Raises:
        ConfigError: naming the most this machine is given.
    """
    most = max(MIN_MOST_ENGINES, 4 * usable_cores())
    if not 1 <= n <= most:
        raise ConfigError(f"{n} engines", advice=f"Ask for 1 to {most} on this machine.")
