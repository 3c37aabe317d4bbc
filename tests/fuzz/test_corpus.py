"""What the guided fuzzer once found, and what hypothesis draws: no target meets anything but our own errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.corpus import read_corpus
from tests.fuzz.targets import MAX_BYTES, TARGETS, prepared

NAMES = pytest.mark.parametrize("name", TARGETS)


@pytest.fixture(autouse=True, scope="module")
def _prepared() -> Iterator[None]:
    with prepared():
        yield


@NAMES
def test_the_corpus_is_harmless(name: str) -> None:
    """Cases 42 and 49, with every input that reached a branch no other did."""
    inputs = read_corpus(name)
    assert inputs and max(map(len, inputs)) <= MAX_BYTES[name]
    for data in inputs:
        TARGETS[name](data)


@NAMES
def test_whatever_hypothesis_draws_is_harmless(name: str) -> None:
    target = TARGETS[name]

    @settings(max_examples=300, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=MAX_BYTES[name]))
    def drawn(data: bytes) -> None:
        target(data)

    drawn()


@NAMES
def test_neighbours_of_the_corpus_are_harmless(name: str) -> None:
    target, inputs = TARGETS[name], read_corpus(name)

    @settings(max_examples=300, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def drawn(data: st.DataObject) -> None:
        chosen = bytearray(data.draw(st.sampled_from(inputs)))
        for _ in range(data.draw(st.integers(1, 4))):
            if chosen:
                chosen[data.draw(st.integers(0, len(chosen) - 1))] = data.draw(st.integers(0, 255))
        target(bytes(chosen + data.draw(st.binary(max_size=20))))

    drawn()
