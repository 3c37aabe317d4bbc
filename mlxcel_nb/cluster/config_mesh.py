"""Which node holds which place of which mesh, and which places are empty or taken twice. Pure; any thread.

A mesh is `pipeline_parallel_size` stages by `tensor_parallel_size` ranks and holds one whole model. There is one for
each replica, made of nodes with a role of the mesh, and one for each prefill or decode group. Hybrid nodes stand for
themselves: one that serves alone is a mesh of a single place when there are replicas, and no mesh at all otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from mlxcel_nb.cluster.config_checks import names
from mlxcel_nb.cluster.config_model import Mesh, Mistake
from mlxcel_nb.cluster.config_reading import Table
from mlxcel_nb.cluster.layout import LayerRange
from mlxcel_nb.cluster.roles import DECODE, GROUP_ROLES, HYBRID, MESH_ROLES, PREFILL, fitting_role

SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
PLACE = ("role", "stage", "rank", "group", "replica", "spare")

Place = tuple[int, int]
"""Stage and rank."""


@dataclass
class _Mesh:
    """One mesh while it is being filled; `places` holds every node that claims a place."""

    name: str
    role: str
    spoken: str
    places: dict[Place, list[Table]] = field(default_factory=lambda: defaultdict(list))

    @property
    def nodes(self) -> list[Table]:
        return [node for each in self.places.values() for node in each]


class Placing:
    """Places the nodes of a file; `mistakes` and `meshes` are what came of it.

    Nodes get the stage, rank, group and replica that go without saying. Nothing is placed while a size is unknown.
    """

    def __init__(self, cluster: Table, nodes: Sequence[Table]) -> None:
        self.mistakes: list[Mistake] = []
        self._cluster = cluster
        self._meshes: dict[str, _Mesh] = {}
        self._unplaced = 0
        working = [node for node in nodes if not node["spare"]]
        self._check_pairs(working)
        if cluster.unknown & set(SIZES):
            return
        self._tp, self._pp, self._dp = (int(cluster[size]) for size in SIZES)
        self._check_roles(working)
        for node in working:
            self._place(node)
        self._check_whole(working)
        for mesh in self._meshes.values():
            self._check_places(mesh)
            self.mistakes += _layer_mistakes(mesh)

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The meshes, once there are no mistakes; members in the order of `Layout`."""
        return tuple(_finished(mesh) for mesh in self._meshes.values())

    # -- roles and sizes --------------------------------------------------------------------------

    def _check_pairs(self, nodes: Sequence[Table]) -> None:
        """Prefill and decode go together, whatever the sizes are."""
        if any("role" in node.unknown for node in nodes):
            return
        roles = {node["role"] for node in nodes}
        for role, other in ((PREFILL, DECODE), (DECODE, PREFILL)):
            if role in roles and other not in roles:
                what = f"there are {role} nodes, but no {other} node"
                mend = f'Add one with role = "{other}", or make the others {HYBRID}.'
                self.mistakes.append(Mistake(where="[[nodes]]", what=what, mend=mend))

    def _check_roles(self, nodes: Sequence[Table]) -> None:
        """Roles of the mesh that its sizes contradict, one line a role."""
        fitting = fitting_role(self._tp, self._pp)
        wrong: dict[str, list[Table]] = defaultdict(list)
        for node in nodes:
            if node["role"] in MESH_ROLES and node["role"] != fitting and "role" not in node.unknown:
                wrong[node["role"]].append(node)
                node.unknown.add("role")
        for role, theirs in wrong.items():
            self.mistakes.append(self._contradiction(role, theirs, fitting))

    def _contradiction(self, role: str, nodes: Sequence[Table], fitting: str) -> Mistake:
        needs = {"pipeline_parallel_size": "stage", "tensor_parallel_size": "rank"}
        if role == "pipeline_stage":
            del needs["tensor_parallel_size"]
        elif role == "tensor_parallel_rank":
            del needs["pipeline_parallel_size"]
        short = [size for size in needs if self._cluster[size] == 1]
        is_are = "is" if len(nodes) == 1 else "are"
        if short:
            size = short[0]
            count = max([2, *(node[needs[size]] + 1 for node in nodes if node[needs[size]] is not None)])
            what = f"{names(nodes)} {is_are} {role}, but {size} is 1"
            mend = f"Set {size} = {count}" + (f", or make the role {fitting}." if fitting != HYBRID else ".")
            return self._cluster.mistake(what, mend, size, hides=True)
        size = "tensor_parallel_size" if role == "pipeline_stage" else "pipeline_parallel_size"
        what = f"{names(nodes)} {is_are} {role}, but {size} is {self._cluster[size]}"
        mend = f"Make the role {fitting}, with stage and rank, or set {size} = 1."
        return self._cluster.mistake(what, mend, size, hides=True)

    def _check_whole(self, nodes: Sequence[Table]) -> None:
        """What is asked for as a whole, and that there is somebody for it."""
        roles = {node["role"] for node in nodes}
        unsure = any("role" in node.unknown for node in nodes)
        if not nodes or unsure or any(mesh.role in MESH_ROLES | {HYBRID} for mesh in self._meshes.values()):
            return
        if self._dp > 1 and roles & GROUP_ROLES:
            what = f"data_parallel_size is {self._dp}, but there is no mesh to repeat: all nodes are in groups"
            mend = "Leave it out; several groups do the same for prefill and decode."
            self.mistakes.append(self._cluster.mistake(what, mend, "data_parallel_size"))
        elif not roles & GROUP_ROLES and self._tp * self._pp > 1:
            fitting = fitting_role(self._tp, self._pp)
            keys = " and ".join(key for key, size in (("stage", self._pp), ("rank", self._tp)) if size > 1)
            what = f"a mesh of {self._size()} is asked for, but {names(nodes)} hold no place in it"
            mend = f'Give {self._tp * self._pp * self._dp} nodes role = "{fitting}" with {keys}, or set the sizes to 1.'
            self.mistakes.append(self._cluster.mistake(what, mend))

    def _size(self) -> str:
        """As in "2 stages by 3 ranks"."""
        shown = [f"{n} {what}" for n, what in ((self._pp, "stages"), (self._tp, "ranks")) if n > 1]
        return " by ".join(shown)

    # -- one node ---------------------------------------------------------------------------------

    def _place(self, node: Table) -> None:
        """Put `node` where it says it belongs, or count it among those nobody can tell of."""
        before, unplaced = len(self.mistakes), self._unplaced
        self._put(node)
        if self._unplaced > unplaced:  # nobody knows whether its place is taken, or what its layers follow
            self.mistakes[before:] = [replace(mistake, hides=True) for mistake in self.mistakes[before:]]

    def _put(self, node: Table) -> None:
        if node.unknown & set(PLACE):
            self._unplaced += 1
            return
        role = node["role"]
        before = len(self.mistakes)
        if role not in GROUP_ROLES and node["group"] is not None:
            self._wrong(node, "group", f"group is for prefill and decode nodes, and this one is {role}")
        if role in GROUP_ROLES and node["replica"] is not None:
            self._wrong(node, "replica", f"a {role} node is in a group and in no replica")
        if role == HYBRID and not self._stands_alone(node):
            self._unplaced += len(self.mistakes) > before
            return
        stage = self._coordinate(node, "stage", self._pp, "pipeline_parallel_size")
        rank = self._coordinate(node, "rank", self._tp, "tensor_parallel_size")
        mesh = self._group(node) if role in GROUP_ROLES else self._replica(node)
        if len(self.mistakes) > before or mesh is None or stage is None or rank is None:
            self._unplaced += 1
            return
        node.values |= {"stage": stage, "rank": rank}
        mesh.places[stage, rank].append(node)

    def _wrong(self, node: Table, key: str, what: str, mend: str | None = None) -> None:
        self.mistakes.append(node.mistake(what, mend or f"Leave {key} out.", key))

    def _stands_alone(self, hybrid: Table) -> bool:
        """Whether a hybrid node is a replica of its own; what it says of places it cannot hold is noted."""
        whole = self._tp * self._pp == 1
        if not whole:
            fitting = fitting_role(self._tp, self._pp)
            for key in ("stage", "rank", "replica"):
                if hybrid[key] is not None:
                    what = f"a hybrid node holds a whole model, and has no {key}"
                    self._wrong(hybrid, key, what, f'Write role = "{fitting}", or leave {key} out.')
        if (not whole or self._dp == 1) and hybrid["layers"] is not None:
            self._wrong(hybrid, "layers", "a hybrid node holds a whole model, and no layers by hand")
        if whole and self._dp == 1:
            self._coordinate(hybrid, "stage", 1, "pipeline_parallel_size")
            self._coordinate(hybrid, "rank", 1, "tensor_parallel_size")
            self._coordinate(hybrid, "replica", 1, "data_parallel_size")
        return whole and self._dp > 1

    def _coordinate(self, node: Table, key: str, size: int, named: str) -> int | None:
        value: int | None = node[key]
        if value is None and size == 1:
            return 0
        choices = f"Write {key} = 0" + (f", or up to {size - 1}." if size > 1 else ", or leave it out.")
        if value is None:
            self.mistakes.append(node.mistake(f"{key} is missing: {named} is {size}", choices))
        elif value >= size:
            self._wrong(node, key, f"{key} {value} does not exist: {named} is {size}", choices)
            return None
        return value

    def _group(self, node: Table) -> _Mesh | None:
        role = node["role"]
        name = node["group"]
        if name is None:
            name = f"{role}-0"
            number = 0
            while self._tp * self._pp == 1 and name in self._meshes:  # a group of one place holds one node
                number += 1
                name = f"{role}-{number}"
        mesh = self._meshes.setdefault(name, _Mesh(name, role, f"group {name}"))
        if mesh.role != role:
            what = f"group {name} holds {mesh.role} nodes, and this one is {role}"
            self._wrong(node, "group", what, "Give it another group.")
            return None
        node.values["group"] = name
        return mesh

    def _replica(self, node: Table) -> _Mesh | None:
        replica: int | None
        if node["replica"] is None and node["role"] == HYBRID:
            taken = [int(name.removeprefix("replica-")) for name in self._meshes if name.startswith("replica-")]
            replica = next((number for number in range(self._dp) if number not in taken), None)
            if replica is None:
                what = f"data_parallel_size is {self._dp}, and so many replicas have a node already"
                self.mistakes.append(node.mistake(what, "Raise data_parallel_size, or take the node out."))
        else:
            replica = self._coordinate(node, "replica", self._dp, "data_parallel_size")
        if replica is None:
            return None
        node.values["replica"] = replica
        spoken = f"replica {replica}" if self._dp > 1 else "the mesh"
        return self._meshes.setdefault(f"replica-{replica}", _Mesh(f"replica-{replica}", node["role"], spoken))

    # -- whole meshes -----------------------------------------------------------------------------

    def _check_places(self, mesh: _Mesh) -> None:
        for place, nodes in sorted(mesh.places.items()):
            if len(nodes) > 1:
                what = f"{self._spoken(place)} of {mesh.spoken} is held {len(nodes)} times"
                line = nodes[-1].lines.of(nodes[-1].place)
                mend = "Give each a place of its own."
                self.mistakes.append(Mistake(where=names(nodes), what=what, mend=mend, line=line))
        # A node whose place is not known may hold one of those that look empty.
        missing = self._missing(mesh)
        if len(missing) > self._unplaced:
            self.mistakes.append(self._empty(missing, mesh.spoken))
        if mesh.role not in GROUP_ROLES and mesh is self._first_replica():
            absent = [n for n in range(self._dp) if f"replica-{n}" not in self._meshes]
            if len(absent) * self._tp * self._pp > self._unplaced:
                which = _listed([str(n) for n in absent], ", ")
                what = f"data_parallel_size is {self._dp}, but no node is in replica {which}"
                mend = "Add nodes for it, or lower data_parallel_size."
                self.mistakes.append(self._cluster.mistake(what, mend, "data_parallel_size"))

    def _first_replica(self) -> _Mesh | None:
        return next((mesh for name, mesh in self._meshes.items() if mesh.role not in GROUP_ROLES), None)

    def _missing(self, mesh: _Mesh) -> list[Place]:
        return [(s, r) for s in range(self._pp) for r in range(self._tp) if not mesh.places.get((s, r))]

    def _empty(self, missing: Sequence[Place], spoken: str) -> Mistake:
        which = _listed([self._spoken(place) for place in missing], "; ")
        what, mend = ("is held by no node", "it") if len(missing) == 1 else ("are held by no node", "each")
        return Mistake(where=spoken, what=f"{which} {what}", mend=f"Add a node for {mend}.")

    def _spoken(self, place: Place) -> str:
        held = zip(("stage", "rank"), place, (self._pp, self._tp), strict=True)
        return ", ".join(f"{key} {number}" for key, number, size in held if size > 1) or "the only place"


def _listed(items: Sequence[str], between: str, limit: int = 6) -> str:
    """As in "a; b; c and 5 more"."""
    shown = between.join(items[:limit])
    return f"{shown} and {len(items) - limit} more" if len(items) > limit else shown


def _layer_mistakes(mesh: _Mesh) -> Iterable[Mistake]:
    """Layers by hand: the same for all ranks of a stage, for all stages or none, on from 0 without gap or overlap."""
    known = [node for node in mesh.nodes if "layers" not in node.unknown]
    silent = [node for node in known if node["layers"] is None]
    if len(silent) == len(known):
        return
    if silent:
        what = f"layers is missing, but other nodes of {mesh.spoken} have them by hand"
        mend = "Write layers for every node of it, or for none."
        yield Mistake(where=names(silent), what=what, mend=mend, line=silent[0].lines.of(silent[0].place), hides=True)
    stages: dict[int, list[Table]] = defaultdict(list)
    for (stage, _), claimants in sorted(mesh.places.items()):
        node = claimants[0]  # that a place is claimed twice is said already
        if "layers" not in node.unknown and node["layers"] is not None:
            stages[stage].append(node)
    for stage, theirs in list(stages.items()):
        differing = next((node for node in theirs if node["layers"] != theirs[0]["layers"]), None)
        if differing is not None:
            what = f"layers {text(differing['layers'])} differ from {text(theirs[0]['layers'])} of {theirs[0].name}"
            what, mend = f"{what}, at stage {stage} as well", "Ranks of a stage hold the same."
            yield differing.mistake(what, mend, "layers", hides=True)
            del stages[stage]  # which of them the next stage follows is not known
    yield from _order_mistakes(stages)


def _order_mistakes(stages: dict[int, list[Table]]) -> Iterable[Mistake]:
    expected, before = 0, -1
    for stage, theirs in sorted(stages.items()):
        first, end = theirs[0]["layers"]
        if stage != before + 1:  # the stage between is missing or has no layers, and said so
            expected = first
        if first != expected:
            follows = f"stage {before} ends at layer {expected - 1}" if stage else "the first layer is 0"
            kind = "leave a gap" if first > expected else "overlap"
            what = f"layers {text((first, end))} of stage {stage} {kind if stage else 'leave a gap'}: {follows}"
            mend = f"Begin them at {expected}, and let stages follow each other."
            yield theirs[0].mistake(what, mend, "layers")
        expected, before = end, stage


def text(layers: LayerRange) -> str:
    """Layers as the file has them: (0, 16) is 0-15."""
    return f"{layers[0]}-{layers[1] - 1}"


def _finished(mesh: _Mesh) -> Mesh:
    ordered = [nodes[0] for _, nodes in sorted(mesh.places.items())]
    layers: tuple[LayerRange, ...] | None = None
    if ordered and ordered[0]["layers"] is not None:
        layers = tuple(dict.fromkeys(node["layers"] for node in ordered))
    return Mesh(name=mesh.name, role=mesh.role, members=tuple(node["id"] for node in ordered), layers=layers)
