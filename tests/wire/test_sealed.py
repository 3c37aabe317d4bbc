"""The sealed secret opens once, for one engine, under one name."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.cluster.secret import random_secret
from mlxcel_nb.errors import SecretError
from mlxcel_nb.wire.sealed import SealedBox, seal_secret

PLACE = {"node_id": "node-a", "cluster": "mlxcel"}
SECRET = random_secret()


def test_it_opens_once() -> None:
    box = SealedBox()
    message = seal_secret(SECRET, box.public, **PLACE)
    assert box.open(message, **PLACE) == SECRET.reveal()
    with pytest.raises(SecretError, match="already"):
        box.open(message, **PLACE)


def test_two_sealings_have_nothing_in_common() -> None:
    box = SealedBox()
    first, second = (seal_secret(SECRET, box.public, **PLACE) for _ in range(2))
    assert first[:32] != second[:32] and first[32:] != second[32:]
    assert SECRET.reveal() not in first


@pytest.mark.parametrize("place", [PLACE | {"node_id": "node-b"}, PLACE | {"cluster": "other"}], ids=str)
def test_it_opens_only_as_the_node_and_cluster_it_is_for(place: dict[str, str]) -> None:
    box = SealedBox()
    message = seal_secret(SECRET, box.public, **PLACE)
    with pytest.raises(SecretError, match="not for this engine"):
        box.open(message, **place)
    assert box.open(message, **PLACE) == SECRET.reveal(), "a bad message does not use the box up"


def test_another_engine_cannot_open_it() -> None:
    with pytest.raises(SecretError, match="not for this engine"):
        SealedBox().open(seal_secret(SECRET, SealedBox().public, **PLACE), **PLACE)


@given(st.data())
def test_a_flipped_bit_is_an_error(data: st.DataObject) -> None:
    box = SealedBox()
    message = bytearray(seal_secret(SECRET, box.public, **PLACE))
    bit = data.draw(st.integers(0, 8 * len(message) - 1).filter(lambda bit: bit != 255))  # X25519 ignores that bit
    message[bit // 8] ^= 1 << bit % 8
    with pytest.raises(SecretError):
        box.open(bytes(message), **PLACE)


@pytest.mark.parametrize("size", [0, 32, 48, 63, 32 + 16 + 4097])
def test_a_message_of_impossible_size_is_an_error(size: int) -> None:
    with pytest.raises(SecretError, match=f"{size} bytes"):
        SealedBox().open(bytes(size), **PLACE)


@pytest.mark.parametrize("public", [b"", bytes(31), bytes(32)], ids=["empty", "short", "low order"])
def test_an_unusable_key_is_an_error(public: bytes) -> None:
    with pytest.raises(SecretError, match="X25519"):
        seal_secret(SECRET, public, **PLACE)
    with pytest.raises(SecretError, match="X25519"):
        SealedBox().open(bytes(80), **PLACE)


def test_a_short_secret_is_not_sealed() -> None:
    with pytest.raises(SecretError, match="at least 16"):
        seal_secret(b"short", SealedBox().public, **PLACE)


def test_a_box_is_neither_shown_nor_copied() -> None:
    box = SealedBox(bytes(range(32)))
    assert repr(box) == "<SealedBox open>"
    with pytest.raises(TypeError):
        pickle.dumps(box)
    with pytest.raises(TypeError):
        copy.deepcopy(box)
