"""Expert-parallel ranks: what each holds, where tokens go and how they come back, whoever has them."""

from __future__ import annotations

import copy
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.errors import ConfigError, MlxcelError, ModelError, WireError
from mlxcel_nb.models import architecture, catalogue
from mlxcel_nb.models.catalogue.families import ENTRIES
from mlxcel_nb.models.loading import load_part
from mlxcel_nb.models.sharding import expert_parallel
from mlxcel_nb.models.sharding.asking import Ask, pack_answer, read_answer
from mlxcel_nb.models.sharding.expert_parallel import Dispatch, Mixture
from mlxcel_nb.models.verifying.running import Meeting, run
from mlxcel_nb.plan.experts import spread
from mlxcel_nb.plan.part import part_of
from tests.models.sharding.quantised import quantised

pytestmark = pytest.mark.usefixtures("not_compiled")


@pytest.mark.parametrize("mode", [("affine", 4, 32), ("mxfp4", 4, 32)], ids=["affine", "mxfp4"])
def test_quantised_experts_stay_quantised_and_are_equal(mode: tuple[str, int, int], tmp_path: Path) -> None:
    """Case 9."""
    how = dict(zip(("mode", "bits", "group_size"), mode, strict=True))
    folder = quantised(ENTRIES["gpt_oss"], tmp_path, how)
    prompt = np.array([[(7 * i + 3) % 257 for i in range(17)]], np.int32)
    whole, split = (run(folder, make_layout(7, ep=ep), [prompt], 6, dtype="native").records[0] for ep in (1, 3))
    assert np.array_equal(whole.tokens, split.tokens)
    assert np.abs(whole.logits - split.logits).max() <= 1e-4


def test_each_rank_holds_its_experts_and_all_the_rest(tmp_path: Path) -> None:
    """Case 9: 3 + 3 + 2; attention, routers and the head are whole on every rank."""
    entry = ENTRIES["qwen3_moe"]
    folder = catalogue.write(entry, tmp_path)
    n = entry.n_layers
    whole = load_part(folder, part_of(make_layout(n), 0, 0))
    layout = make_layout(n, ep=3)
    parts = [load_part(folder, part_of(layout, 0, rank), exchange=list) for rank in range(3)]
    shapes = [{a.shape[0] for name, a in named(part.model) if ".switch_mlp." in name} for part in parts]
    counts = [count for each in shapes for count in each]
    assert counts == [3, 3, 2]
    experts = sum(array.nbytes for name, array in named(whole.model) if ".switch_mlp." in name)
    for part, count in zip(parts, counts, strict=True):
        assert part.planned_bytes == part.resident_bytes
        assert part.resident_bytes == whole.resident_bytes - experts + experts * count // 8
        assert part.part.samples


def named(model: Any) -> list[tuple[str, mx.array]]:
    from mlxcel_nb.models.stages import named_arrays

    return named_arrays(model)


def test_what_cannot_be_spread_is_refused_with_the_reason(tmp_path: Path) -> None:
    for name, ep, why in (
        ("llama", 2, "no experts to spread"),
        ("qwen3_moe", 9, "9 expert-parallel ranks for 8 experts"),
        ("dbrx", 2, "modules of their own"),
    ):
        entry = ENTRIES[name]
        folder = catalogue.write(entry, tmp_path / name)
        with pytest.raises(ConfigError, match=why):
            load_part(folder, part_of(make_layout(entry.n_layers, ep=ep), 0, 0), exchange=list)


# -- the exchange alone -------------------------------------------------------------------------------

WIDTH = 4


def scaled_by(first: int) -> Any:
    """Experts that multiply a token by their number, counted from 1, and add it."""

    def call(x: mx.array, indices: mx.array) -> mx.array:
        number = (indices + first + 1).astype(x.dtype)[..., None]
        return x[:, None, :] * number + number

    return call


def all_ranks(total: int, size: int, do: Any) -> list[Any]:
    """What `do(dispatch, rank)` gives on each of `size` ranks, threads, that share a mixture of `total` experts."""
    meeting, given_back, failed = Meeting(size), [None] * size, []

    def main(rank: int) -> None:
        try:
            dispatch = Dispatch(rank, size, meeting.all_to_all(rank))
            first, stop = spread(total, size)[rank]
            dispatch.mixtures.append(Mixture("mixture", scaled_by(first), total, stop - first))
            given_back[rank] = do(dispatch, rank)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failed.append(error)
            meeting.leave()

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    told = [error for error in failed if isinstance(error, MlxcelError)]
    if failed:
        raise (told or failed)[0]
    return given_back


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ({0: [[0, 3]], 1: [[2, 5]]}, "nobody asks for the experts of rank 2"),
        ({0: [[6, 7]], 1: [[0, 1]]}, "both experts of a token are on one rank, which has none of its own"),
        ({2: [[7, 6], [6, 7], [0, 1]]}, "one rank has all the tokens, and two ranks serve"),
        ({}, "nobody has a token"),
        ({0: [[4, 4]], 1: [[4, 4]], 2: [[4, 4]]}, "everybody asks for one expert, twice"),
    ],
)
def test_tokens_go_where_their_experts_are_and_come_back(choices: dict[int, list[list[int]]], why: str) -> None:
    """Case 9: a rank whose experts get no token; a token that goes to two experts of one rank."""

    def do(dispatch: Dispatch, rank: int) -> Any:
        if rank not in choices:
            dispatch.serve(lambda: None)
            return None
        x = mx.arange(len(choices[rank]) * WIDTH, dtype=mx.float32).reshape(1, -1, WIDTH) + 100 * rank
        dispatch.begin()
        made = dispatch.ask(0, x, mx.array([choices[rank]], mx.uint32))
        dispatch.end()
        return np.array(x), np.array(made)

    for rank, gave in enumerate(all_ranks(8, 3, do)):
        if gave is None:
            continue
        x, made = gave
        number = np.array([choices[rank]], np.float32)[..., None] + 1
        assert made.shape == (1, len(choices[rank]), 2, WIDTH), why
        assert np.array_equal(made, x[:, :, None, :] * number + number), why


@pytest.mark.parametrize("kind", [mx.float16, mx.bfloat16, mx.float32])
def test_activations_of_every_type_travel(kind: mx.Dtype) -> None:
    def do(dispatch: Dispatch, rank: int) -> Any:
        if rank:
            dispatch.serve(lambda: None)
            return None
        x = mx.ones((2, WIDTH), kind)
        made = dispatch.ask(0, x, mx.array([[0, 3], [2, 1]]))
        assert made.dtype == kind
        return np.array(made.astype(mx.float32))[:, :, 0]

    assert all_ranks(4, 2, do)[0].tolist() == [[2.0, 8.0], [6.0, 4.0]]


def test_a_rank_whose_experts_or_tokens_are_of_another_type_is_named() -> None:
    """As auto makes them where some nodes have a GPU and others have none."""

    def experts_differ(dispatch: Dispatch, rank: int) -> None:
        if rank:
            (own,) = dispatch.mixtures
            dispatch.mixtures[0] = replace(own, run=lambda x, indices: own.run(x, indices).astype(mx.float32))
            dispatch.serve(lambda: None)
        else:
            dispatch.ask(0, mx.ones((1, WIDTH), mx.bfloat16), mx.array([[0, 3]]))

    with pytest.raises(WireError, match="rank 1: its experts give float32 in 16 bytes where others have bfloat16 in 8"):
        all_ranks(4, 2, experts_differ)

    def tokens_differ(dispatch: Dispatch, rank: int) -> None:
        dispatch.ask(0, mx.ones((1, WIDTH), mx.float32 if rank else mx.bfloat16), mx.array([[0]]))

    with pytest.raises(WireError, match="rank 1: its tokens are float32 in 16 bytes where others have bfloat16 in 8"):
        all_ranks(4, 2, tokens_differ)


def test_a_model_that_runs_its_mixtures_otherwise_is_an_error_and_not_a_wrong_sum() -> None:
    alone = Dispatch(0, 1, list)
    alone.mixtures += [Mixture(name, scaled_by(0), 2, 2) for name in ("first", "second")]
    x, chosen_ = mx.ones((1, WIDTH)), mx.array([[1]])
    alone.begin()
    with pytest.raises(ModelError, match="second out of turn"):
        alone.ask(1, x, chosen_)
    alone.ask(0, x, chosen_)
    with pytest.raises(ModelError, match="ran 1 of its 2 mixtures"):
        alone.end()
    alone.begin()
    with pytest.raises(ModelError, match="an expert was chosen that is not there"):
        alone.ask(0, x, mx.array([[2]]))


def test_a_check_leaves_a_step_between_two_mixtures() -> None:
    served = Dispatch(0, 1, list)
    served.mixtures.append(Mixture("only", scaled_by(0), 2, 2))

    def stop() -> None:
        raise WireError("stopped")

    with pytest.raises(WireError, match="stopped"):
        served.serve(stop)


def test_mixtures_are_found_in_the_order_of_layers() -> None:
    config = {**copy.deepcopy(ENTRIES["qwen3_moe"].config), "num_hidden_layers": 12}
    model = architecture.build(config)
    blocks = expert_parallel.find(model, config, part_of(make_layout(12, ep=2), 0, 0), lambda _: 1)
    layers = [int(block.path.split(".")[2]) for block in blocks]
    assert layers == sorted(layers)
    assert layers[-1] >= 10


# -- what is on the wire --------------------------------------------------------------------------------


def test_a_token_that_asks_for_two_experts_of_a_rank_travels_once() -> None:
    rows = np.arange(2 * 8, dtype=np.uint8).reshape(2, 8)
    ask = Ask("float32", rows, np.array([0, 0, 1]), np.array([1, 2, 0]))
    data = ask.pack()
    assert len(data) == 16 + 2 * 3 * 4 + 2 * 8
    back = Ask.read(data, 3, "rank 1")
    assert back.kind == "float32"
    assert back.rows.tolist() == rows.tolist()
    assert (back.row.tolist(), back.expert.tolist()) == ([0, 0, 1], [1, 2, 0])


@pytest.mark.parametrize(("at", "value"), [(0, 9), (1, 3), (2, 4), (3, 7), (4, 2), (7, 3), (1, 2**32 - 1)])
def test_an_ask_whose_numbers_do_not_fit_is_refused_naming_the_node(at: int, value: int) -> None:
    ask = Ask("float32", np.zeros((2, 8), np.uint8), np.array([0, 0, 1]), np.array([1, 2, 0]))
    numbers = np.frombuffer(ask.pack(), np.uint32).copy()
    numbers[at] = value
    with pytest.raises(WireError, match="mac2"):
        Ask.read(numbers.tobytes(), 3, "mac2")


def test_few_bytes_do_not_stand_for_many_rows() -> None:
    """A row of a few bytes, asked for by a great many pairs, would be copied for each of them."""
    ask = Ask("float32", np.zeros((1, 8), np.uint8), np.zeros(1000, np.int64), np.zeros(1000, np.int64))
    with pytest.raises(WireError, match="1 tokens for 1000 experts, of which there are 3"):
        Ask.read(ask.pack(), 3, "mac2")


def test_what_an_ask_would_take_is_bounded_before_it_is_taken() -> None:
    """32 MB, which would be 2 GB once each expert has its token: as much again for what they make of it."""
    few = np.zeros(64, np.int64)
    with pytest.raises(WireError, match="mac2: an ask for 64 experts with tokens of 33554432 bytes"):
        Ask.read(Ask("float32", np.zeros((1, 32 << 20), np.uint8), few, few).pack(), 3, "mac2")


@given(st.binary(max_size=80))
def test_bytes_of_any_kind_are_an_ask_or_refused(data: bytes) -> None:
    with suppress(WireError):
        assert Ask.read(data, 2, "mac2").rows.nbytes < len(data)
    with suppress(WireError):
        assert read_answer(data, 1, "mac2")[1].nbytes < len(data)


def test_an_answer_has_a_row_for_each_pair() -> None:
    rows = np.arange(12, dtype=np.uint8).reshape(3, 4)
    kind, back = read_answer(pack_answer("float16", rows), 3, "rank 1")
    assert (kind, back.tolist()) == ("float16", rows.tolist())
    with pytest.raises(WireError, match="3 rows in 12 bytes where 2 are due"):
        read_answer(pack_answer("float16", rows), 2, "rank 1")
    assert read_answer(pack_answer("float32", np.zeros((0, 0), np.uint8)), 0, "rank 1")[1].size == 0
