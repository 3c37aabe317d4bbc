"""`config check`: what a cluster file makes of its nodes, or all its mistakes."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from mlxcel_nb.cluster.config import ClusterConfig, check_text, parse_config, read_text
from mlxcel_nb.cluster.roles import HYBRID
from mlxcel_nb.cluster.secret import read_secret_file
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.display.reports import layers_text
from mlxcel_nb.display.view import Column, View, note, table
from mlxcel_nb.errors import SecretError
from mlxcel_nb.util.units import bytes_text


def check(args: argparse.Namespace, context: Context) -> int:
    """Handler of `config check`; the exit status."""
    text = read_text(args.file)
    if not getattr(args, "json", False):
        context.console.show(config_view(parse_config(text, source=args.file), args.file))
        return 0
    config, mistakes = check_text(text, source=args.file)
    found = {"good": config is not None, "mistakes": [asdict(mistake) for mistake in mistakes]}
    line = json.dumps(found | ({"cluster": _plain(config)} if config else {}), ensure_ascii=False)
    context.console.show(View(line, note(line).html))
    return 0 if config else 1


def config_view(config: ClusterConfig, source: str) -> View:
    """Nodes, their roles and places, and what else the file decides."""
    columns = [
        Column("node"),
        Column("role"),
        Column("replica", number=True),
        Column("group"),
        Column("stage", number=True),
        Column("rank", number=True),
        Column("layers"),
        Column("address"),
        Column("memory", number=True),
        Column("cores", number=True),
    ]
    repeated = config.data_parallel_size > 1
    rows: list[list[object]] = [
        [
            node.id,
            f"{node.role}, spare" if node.spare else node.role,
            node.replica if repeated else None,
            node.group,
            node.stage if config.pipeline_parallel_size > 1 else None,
            node.rank if config.tensor_parallel_size > 1 else None,
            layers_text(node.layers),
            str(node.address) if node.address.port else f"{str(node.address).removesuffix(':0')}, port told by beacons",
            bytes_text(node.memory_bytes or None),
            node.compute_units or None,
        ]
        for node in config.nodes
    ]
    return table(f"Cluster {config.name}: {_shape(config)}", columns, rows, _notes(config, source))


def _shape(config: ClusterConfig) -> str:
    count = len(config.nodes)
    sizes = (config.pipeline_parallel_size, config.tensor_parallel_size)
    size = " by ".join(f"{n} {what}" for n, what in zip(sizes, ("stages", "ranks"), strict=True) if n > 1)
    groups = [mesh.name for mesh in config.meshes if not mesh.name.startswith("replica-")]
    words = [f"{count} node{'s' if count > 1 else ''}", size]
    if config.data_parallel_size > 1:
        words.append(f"{config.data_parallel_size} replicas")
    if groups:
        words.append(f"groups {', '.join(groups)}")
    return ", ".join(filter(None, words))


def _notes(config: ClusterConfig, source: str) -> list[str]:
    chosen = [f"transport {config.transport}", f"discovery {config.discovery}", f"elastic {config.elastic}"]
    if config.model:
        chosen.insert(0, f"model {config.model}")
    if config.port_range:
        chosen.append(f"ports {config.port_range[0]}-{config.port_range[1]}")
    if config.expert_parallel:
        chosen.append("experts spread")
    notes = [", ".join(chosen)]
    if config.collectives != "own":
        notes.append(f"Collectives are {config.collectives}: UNENCRYPTED. Use them only on links you trust.")
    return [*notes, *_secret_notes(config), f"{source} is good."]


def _secret_notes(config: ClusterConfig) -> list[str]:
    """What a start on this host would find. A file that only other hosts have is no mistake of the cluster file."""
    if len(config.nodes) == 1 and config.nodes[0].role == HYBRID:
        return ["A hybrid node alone: it reads no cluster secret."]
    notes = []
    for what, path in (("Secret", config.secret_file), ("Previous secret", config.previous_secret_file)):
        if path is None:
            continue
        try:
            read_secret_file(path)
            notes.append(f"{what}: {path}")
        except SecretError as problem:
            notes.append(f"{what}, as seen from this host: {problem}")
    if config.secret_file is None:
        notes.append("Secret: to be given by --secret-file or MLXCEL_CLUSTER_SECRET_FILE at every start.")
    return notes


def _plain(config: ClusterConfig) -> dict[str, Any]:
    """The file with its defaults filled in; layers with both ends included, as users write them."""
    plain = asdict(config)
    for node, entry in zip(plain["nodes"], config.nodes, strict=True):
        node["address"] = str(entry.address)
        node["layers"] = layers_text(entry.layers)
    for mesh, made in zip(plain["meshes"], config.meshes, strict=True):
        mesh["layers"] = [layers_text(layers) for layers in made.layers] if made.layers else None
    return plain
