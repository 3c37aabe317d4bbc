"""What a model is made of, found without its weights: bytes, products and caches of each layer on each rank.

The model is built as a node builds it, pruned and cut by the very code that loads it, and asked for shapes. Caches are
mlx-lm's own: the model runs over a few tokens as a lazy graph that nobody evaluates, so a 400 GB model costs no memory
here. Sizes come from the files where there are some, else from config.json. For the MLX thread.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlxcel_nb.cluster.layout import Layout
from mlxcel_nb.errors import ConfigError, ModelError
from mlxcel_nb.models import architecture, quantisation, sharding, stages, untested
from mlxcel_nb.models.imagined import Imagined, drop_tied_head
from mlxcel_nb.models.looking import Look
from mlxcel_nb.models.safetensors_index import TensorEntry
from mlxcel_nb.models.sharding import expert_parallel, vocabulary
from mlxcel_nb.models.sharding.block import Block
from mlxcel_nb.models.stages import named_arrays
from mlxcel_nb.models.weights import Weights
from mlxcel_nb.plan.experts import experts_in
from mlxcel_nb.plan.facts import Ends, Growth, LayerFacts, ModelFacts, RankFacts
from mlxcel_nb.plan.part import Part, part_of, whole
from mlxcel_nb.plan.shards import check_tp

CONTEXTS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "model_max_length",
)
HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads")


class _Built(NamedTuple):
    """The whole model, as it is before anything is pruned or cut."""

    model: Any
    skeleton: Any
    weights: Weights


@dataclass
class _Source:
    """What to build, again and again."""

    config: dict[str, Any]
    folder: Path | None
    entries: Mapping[str, TensorEntry]
    target: mx.Dtype | None
    chunk: int
    shared: bool = False
    """Whether tensor ranks share the vocabulary: asked for, and this model's can be."""
    n_layers: int = 0
    notes: list[str] = field(default_factory=list)

    def build(self) -> _Built:
        model = architecture.build(copy.deepcopy(self.config), self.folder)
        if not self.entries:
            drop_tied_head(model, self.config)
        self.n_layers = len(model.layers)
        skeleton = stages.find_skeleton(model, self.n_layers)
        weights: Weights
        if self.entries:
            table = quantisation.settings(self.config)
            weights = Weights(model, skeleton, self.entries, table, target=self.target)
        else:
            weights = Imagined(model, skeleton, self.config, target=self.target)
        return _Built(model, skeleton, weights)


def gather(
    config: dict[str, Any],
    *,
    name: str,
    folder: Path | None = None,
    entries: Mapping[str, TensorEntry] | None = None,
    dtype: str = "native",
    ranks: int = 1,
    chunk: int = 256,
    vocab_parallel: bool = False,
) -> ModelFacts:
    """Look at the model of `config`.

    Args:
        entries: the tensors of its files, if there are some.
        dtype: as for loading, "auto" excepted.
        ranks: tensor parallel sizes up to this one are tried.
        chunk: tokens of a prompt that are read at once.
        vocab_parallel: have tensor ranks share the embedding and the head too, where the architecture lets them.

    Raises:
        ModelError: an architecture or a config that cannot be built.
    """
    target = None if dtype == "native" else getattr(mx, dtype)
    source = _Source(config, folder, entries or {}, target, chunk)
    built = source.build()
    if vocab_parallel and ranks > 1:
        why = vocabulary.why_whole(built.skeleton, tried=_tried(source))
        source.shared = not why
        source.notes += [f"vocabulary is computed whole on every tensor rank: {why}"] if why else []
    held, unstaged = _held(source, built.skeleton, ranks)
    found: dict[int, tuple[RankFacts, ...]] = {}
    refused: dict[int, ConfigError] = {}
    seen: dict[Any, Look] = {}
    activations = getattr(mx, built.weights.activations(tuple(dict(named_arrays(built.model)))))
    for tp in range(1, ranks + 1):
        try:
            found[tp] = tuple(
                _rank(source, built, _part(source, tp, number), held, seen, activations) for number in range(tp)
            )
        except ConfigError as error:
            refused[tp] = error
    look = next(iter(seen.values()))
    spread, unspread = _spread(source, built, look, found[1][0], ranks, activations)
    vocab = number_of(config, "vocab_size") or architecture.vocabulary(built.model)
    return ModelFacts(
        name=name,
        model_type=str(config["model_type"]),
        context=number_of(config, *CONTEXTS),
        dtype=str(activations).rpartition(".")[2],
        itemsize=activations.size,
        width=look.width or number_of(config, "hidden_size", "n_embd", "d_model") * activations.size,
        vocab=vocab,
        heads=number_of(config, *HEADS),
        chunk=chunk,
        ranks=found,
        refused=refused,
        unstaged=unstaged,
        spread=spread,
        unspread=unspread,
        laps=built.skeleton.family.laps if built.skeleton else 1,
        vocab_parallel=source.shared,
        quantised=_packed(config) if target is None else "",
        notes=tuple(dict.fromkeys(filter(None, [look.note, *source.notes]))),
    )


def weight_bytes(
    config: dict[str, Any], folder: Path | None, entries: Mapping[str, TensorEntry] | None, dtype: str
) -> int:
    """Bytes of the whole model's weights in a dtype, and of nothing else; arguments as of `gather`."""
    target = None if dtype == "native" else getattr(mx, dtype)
    built = _Source(config, folder, entries or {}, target, 1).build()
    return sum(built.weights.size(name) for name, _ in named_arrays(built.model))


def part_caches(folder: Path, part: Part, *, dtype: str, chunk: int, allow_code: bool = False) -> list[Growth]:
    """How the caches of a part that is loaded grow; `dtype` is that of its activations.

    Raises:
        ModelError: it is code of the folder's own, which may do anything when it is run a second time.
    """
    config = architecture.read_config(folder, allow_code=allow_code)
    if config.get("model_file"):
        raise ModelError("a model that is Python code of its own is not run once more")
    source = _Source(config, folder, {}, getattr(mx, dtype), chunk)
    number = Part((0, part.n_layers), part.n_layers, 0, 1, part.tp_rank, part.tp_size)
    rank = _rank(source, source.build(), number, {}, {}, getattr(mx, dtype))
    return [growth for layer in rank.layers[slice(*part.layers)] for growth in layer.cache]


def as_converted(config: dict[str, Any], bits: int) -> dict[str, Any]:
    """The config of the same model converted to `bits` bits a weight, in groups of 64; 16 undoes any quantisation."""
    plain = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    if isinstance(text := plain.get("text_config"), dict):
        plain["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    return plain if bits >= 16 else {**plain, "quantization": {"group_size": 64, "bits": bits, "mode": "affine"}}


def _part(source: _Source, tp: int, number: int) -> Part:
    return Part((0, source.n_layers), source.n_layers, 0, 1, number, tp, vocab_parallel=source.shared and tp > 1)


def _tried(source: _Source) -> bool:
    """Whether the catalogue proves the architecture on tensor ranks."""
    return not untested.remark("tensor ranks", architecture.module_name(source.config))


def _held(source: _Source, skeleton: Any, ranks: int) -> tuple[dict[tuple[str, bool], set[str]], str]:
    """Names of weights beside the layers, by where a stage stands and whether it is rank 0; why there are no stages."""
    n = source.n_layers
    kinds = {"only": whole(n)}
    unstaged = ""
    if n > 1:
        try:
            source.notes += stages.check_stages(
                skeleton, architecture.module_name(source.config), Part((0, 1), n, 0, 2)
            )
            kinds |= {"first": Part((0, 1), n, 0, 2), "last": Part((1, n), n, 1, 2)}
            if n > 2:
                kinds["middle"] = Part((1, 2), n, 1, 3)
        except ConfigError as error:
            unstaged = error.cause
    held = {}
    for kind, part in kinds.items():
        for first in (True, False) if ranks > 1 else (True,):
            one = part if first else replace(part, tp_rank=1, tp_size=2, vocab_parallel=source.shared)
            model, own, _ = source.build()
            paths = tuple(prefix for each in _prefixes(own) for prefix in each)
            if own is not None:
                stages.prune(own, one)
            held[kind, first] = {name for name, _ in named_arrays(model) if not name.startswith(paths)}
    return held, unstaged


def _prefixes(skeleton: Any) -> list[tuple[str, ...]]:
    """What the names of each layer's weights begin with."""
    return [skeleton.prefixes_of(index) for index in range(len(skeleton.layers))] if skeleton else []


def _rank(
    source: _Source,
    built: _Built,
    part: Part,
    held: Mapping[tuple[str, bool], set[str]],
    seen: dict[Any, Look],
    activations: mx.Dtype,
) -> RankFacts:
    """One rank's share of all layers. `built` is only asked; what a share changes is done to a model of its own."""
    check_tp(source.config, part.tp_size)
    _, skeleton, weights = built
    tensor_plan = sharding.plan(built.model, source.config, part, groups=weights.group)
    if part.vocab_parallel:
        vocabulary.share(tensor_plan, skeleton, part, _side_by_side, tried=_tried(source))
    weights.cuts = tensor_plan.cuts
    source.notes += untested.of_ranks(architecture.module_name(source.config), part)
    source.notes += [f"tp{part.tp_size}: {remark}" for remark in tensor_plan.remarks() if part.tp_rank == 0]
    names_here = (name for name, _ in named_arrays(built.model) if name not in tensor_plan.dropped)
    shapes = {name: weights._cut_shape(name) for name in names_here}
    look = seen.get(key := tuple(shapes.items()))
    if look is None:
        model, own, _ = source.build()
        sharding.apply(model, tensor_plan)
        heads = max(1, number_of(source.config, *HEADS) // part.tp_size)
        look = seen[key] = Look(model, own.layers if own else [], heads=heads, chunk=source.chunk)
        look.place(shapes, activations)
        sharding.join(model, tensor_plan, look.all_reduce)
        try:
            look.run(_by_config(source.config, part.tp_size, activations.size))
        except architecture.TRIPPED as error:  # what mlx-lm reads of a config only when it runs
            raise architecture.not_accepted(source.config, error) from error
    names = [[name for name in shapes if name.startswith(each)] for each in _prefixes(skeleton)] or [list(shapes)]
    laps = skeleton.family.laps if skeleton else 1
    layers = [_layer(weights, own, shapes, look, index, activations, laps) for index, own in enumerate(names)]
    layers += [LayerFacts(0, 0, 0)] * (source.n_layers - len(layers))
    first = part.tp_rank == 0

    def beside(kind: str) -> set[str]:
        return held.get((kind, first), set()) & shapes.keys() if skeleton else set()

    read = [name for name in beside("last") or beside("only") if part.has_head and len(shapes[name]) > 1]
    return RankFacts(
        layers=tuple(layers),
        ends=Ends(*(sum(map(weights.size, beside(kind))) for kind in ("only", "first", "middle", "last"))),
        head=sum(weights.size(name) for name in read),
        head_products=sum(math.prod(shapes[name]) for name in read),
    )


def _side_by_side(x: mx.array, widths: Sequence[int]) -> mx.array:
    """Stands in for the gathering of the ranks' logits."""
    return mx.zeros((*x.shape[:-1], sum(widths)), x.dtype)


def _spread(
    source: _Source,
    built: _Built,
    look: Look,
    whole_model: RankFacts,
    ranks: int,
    activations: mx.Dtype,
) -> tuple[dict[int, tuple[RankFacts, ...]], dict[int, ConfigError]]:
    """The shares of expert-parallel ranks, up to `ranks` of them, and the numbers that cannot be; none without experts.

    They differ from the whole model in how many experts they have; what the whole one's run has shown holds for all.
    """
    found: dict[int, tuple[RankFacts, ...]] = {}
    refused: dict[int, ConfigError] = {}
    if not experts_in(source.config) or built.skeleton is None:
        return found, refused
    for ep in range(2, ranks + 1):
        layout = Layout(((0, source.n_layers),), ep=ep)
        try:
            found[ep] = tuple(
                _expert_rank(source, built, part_of(layout, 0, number), look, whole_model, activations)
                for number in range(ep)
            )
        except ConfigError as error:
            refused[ep] = error
    return found, refused


def _expert_rank(
    source: _Source,
    built: _Built,
    part: Part,
    look: Look,
    whole_model: RankFacts,
    activations: mx.Dtype,
) -> RankFacts:
    """One expert-parallel rank's share of all layers."""
    blocks = expert_parallel.find(built.model, source.config, part, built.weights.group)
    source.notes += untested.of_ranks(architecture.module_name(source.config), part)
    built.weights.cuts = expert_parallel.cuts(blocks)
    shapes = {name: built.weights._cut_shape(name) for name, _ in named_arrays(built.model)}
    layers = []
    for index, (same, prefixes) in enumerate(zip(whole_model.layers, _prefixes(built.skeleton), strict=True)):
        names = [name for name in shapes if name.startswith(prefixes)]
        mine = _layer(built.weights, names, shapes, look, index, activations, built.skeleton.family.laps)
        sums = [
            size
            for block in blocks
            if block.path.startswith(prefixes)
            for size in _ways(block, look, part.ep_size, activations)
        ]
        layers.append(replace(mine, inner=same.inner, cache=same.cache, sums=tuple(sums)))
    return replace(whole_model, layers=tuple(layers))


def _ways(block: Block, look: Look, ep: int, activations: mx.Dtype) -> tuple[int, int]:
    """Bytes a token of what goes to each other rank, and of what comes back: from its share of the experts chosen."""
    product = next(name for name in block.shapes if name in ("up_proj.weight", "fc1.weight"))
    wide = block.shapes[product][-1] * activations.size
    chosen = look.chosen.get(block.full(product).rpartition(".")[0], 1.0) * expert_parallel.count(block)
    return wide, round(chosen * wide / ep)


def _layer(
    weights: Weights,
    names: list[str],
    shapes: Mapping[str, tuple[int, ...]],
    look: Look,
    index: int,
    dtype: mx.Dtype,
    laps: int,
) -> LayerFacts:
    """One layer of a share; of a model that runs it several times over, what a token takes of it each time."""
    active = products = inner = 0.0
    for name in names:
        path, shape = name.rpartition(".")[0], shapes[name]
        chosen = look.chosen.get(path, 1.0)
        active += weights.size(name) * chosen
        if len(shape) > 1:
            products += math.prod(shape) * chosen
            inner += math.prod(shape[:-1]) * chosen * dtype.size
    return LayerFacts(
        weights=sum(weights.size(name) for name in names),
        active=round(laps * active),
        products=round(laps * products),
        inner=round(inner),
        cache=tuple(look.caches.get(index, ())),
        sums=tuple(look.sums.get(index, ())),
    )


def _by_config(config: Mapping[str, Any], tp: int, itemsize: int) -> Growth:
    """Keys and values of a layer of the usual attention, as its config counts heads."""
    heads = number_of(config, *HEADS)
    keys = number_of(config, "num_key_value_heads") or heads
    size = number_of(config, "head_dim") or number_of(config, "hidden_size") // max(1, heads)
    return Growth(2 * -(-keys // tp) * size * itemsize, step=256, group=max(1, heads // max(1, keys)))


def _tables(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The config itself, and the one it has for its text model."""
    yield config
    if isinstance(inner := config.get("text_config"), Mapping):
        yield inner


def number_of(config: Mapping[str, Any], *names: str) -> int:
    """The first whole number that goes by one of `names`, 0 without one."""
    found = (table.get(name) for table in _tables(config) for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), 0)


def _packed(config: Mapping[str, Any]) -> str:
    table = quantisation.settings(config)
    if "bits" not in table:
        return ""
    packed = quantisation.packing(table)
    return f"{packed.bits}-bit, groups of {packed.group_size}"
