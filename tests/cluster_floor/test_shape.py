"""`--link`: what can be written, what it means, and what is said of the rest."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxcel_nb.cluster.shape import MAX_LATENCY_S, MAX_LOSS, LinkPlan, LinkShape, parse_link, parse_links
from mlxcel_nb.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "latency_s", "bytes_per_s", "loss"),
    [
        ("5ms", 0.005, None, 0.0),
        ("1Gbit", 0.0, 125e6, 0.0),
        ("5ms,1Gbit", 0.005, 125e6, 0.0),
        ("200us,10Gbit,0.1%", 0.0002, 1.25e9, 0.001),
        ("0.1%, 200 µs, 10gbit/s", 0.0002, 1.25e9, 0.001),
        ("1.5s,8kbit,50%", 1.5, 1000.0, 0.5),
        ("0ms", 0.0, None, 0.0),
    ],
)
def test_latency_rate_and_loss_in_any_order(
    text: str, latency_s: float, bytes_per_s: float | None, loss: float
) -> None:
    assert parse_link(text) == LinkShape(latency_s=latency_s, bytes_per_s=bytes_per_s, loss=loss)


@example(0, 1_000_000_000_001, 0)
@given(
    st.integers(0, int(MAX_LATENCY_S * 1e9)),
    st.none() | st.integers(8000, 10**13),
    st.integers(0, int(MAX_LOSS * 1e6)),
)
def test_a_shape_reads_back_as_it_was_written(nanoseconds: int, bits: int | None, millionths: int) -> None:
    shape = LinkShape(
        latency_s=nanoseconds / 1e9, bytes_per_s=None if bits is None else bits / 8, loss=millionths / 1e6
    )
    assert parse_link(str(shape)) == shape


@pytest.mark.parametrize(
    ("text", "canonical", "words"),
    [
        ("1Gbit,5ms", "5ms,1Gbit", "5 ms, 1 Gbit/s"),
        ("0.2ms,10000Mbit,0.1%", "200us,10Gbit,0.1%", "200 us, 10 Gbit/s, 0.1 % lost"),
        ("0ms", "0ms", "as it is"),
    ],
)
def test_it_has_one_spelling_and_words_for_people(text: str, canonical: str, words: str) -> None:
    shape = parse_link(text)
    assert (str(shape), shape.words) == (canonical, words)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is not a latency, a rate or a loss"),
        ("5", "as in 5ms,1Gbit"),
        ("5ms,", "'' is not"),
        ("fast", "'fast' is not"),
        ("5 parsec", "'parsec' is no unit"),
        ("5ms,6ms", "two of what '6ms' says"),
        ("-5ms", "'-5ms' is not"),
        ("3s", "a latency of 3 s. 0 to 2 s are possible"),
        ("1kbit", "a rate of 1000 bit/s. It takes 8 kbit"),
        ("60%", "a loss of 60.000%. 0 to 50% are possible"),
        ("1e3ms", "'1e3ms' is not"),
        ("5ms;1Gbit", "'5ms;1Gbit' is not"),
    ],
)
def test_what_cannot_be_read_is_said_with_how_to_write_it(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_link(text)
    assert says in str(refused.value)


def test_a_pair_has_its_own_shape_in_both_directions_and_every_other_link_the_general_one() -> None:
    plan = parse_links(["0-3:40ms", "5ms,1Gbit", "2-1:1ms"])
    assert plan.between("engine-0", "engine-3") == plan.between("engine-3", "engine-0") == parse_link("40ms")
    assert plan.between("engine-1", "engine-2") == parse_link("1ms")
    assert plan.between("engine-0", "engine-1") == plan.between("router-5", "engine-3") == parse_link("5ms,1Gbit")
    shapes = plan.seen_from("engine-3")
    assert shapes is not None and shapes("engine-0") == parse_link("40ms")


def test_without_a_general_shape_other_links_stay_as_they_are() -> None:
    plan = parse_links(["0-1:40ms"], ["a", "b", "c"])
    assert plan.between("b", "a") == parse_link("40ms")
    assert plan.between("a", "c") is None
    assert plan == parse_links(["b..a:40ms"], ["a", "b", "c"])
    assert parse_links([]) == LinkPlan()
    assert LinkPlan().seen_from("a") is None


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["1ms", "2ms"], "two shapes for every link, 1ms and 2ms"),
        (["0-1:1ms", "1-0:2ms"], "two shapes for the link 1-0: 1ms and 2ms"),
        (["1-1:1ms"], "engine 1 has no link to itself"),
        (["0-4:1ms"], "there is no engine 4. They are numbered 0 to 3."),
        (["0:1ms"], "'0' is not a pair of engines"),
        (["a-b:1ms"], "'a-b' is not a pair of engines. Write A-B:SHAPE"),
        (["engine-0..b:1ms"], "there is no node b. There are engine-0, engine-1, engine-2, engine-3."),
        (["engine-0..engine-0:1ms"], "is not a pair of nodes"),
        (["..engine-0:1ms"], "is not a pair of nodes"),
        (["0-1:slow"], "'slow' is not a latency"),
    ],
)
def test_shapes_that_contradict_each_other_or_name_nobody_are_refused(texts: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_links(texts, [f"engine-{n}" for n in range(4)])
    assert says in str(refused.value)


def test_nodes_without_a_file_have_ids_and_no_numbers() -> None:
    plan = parse_links(["mac-1..mac-2:40ms"], ())
    assert plan.between("mac-2", "mac-1") == parse_link("40ms")
    with pytest.raises(ConfigError, match="nodes have no numbers here"):
        parse_links(["0-1:40ms"], ())
