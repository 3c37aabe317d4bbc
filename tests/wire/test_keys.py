"""Key derivation against RFC 5869, and what must differ."""

from __future__ import annotations

import pytest

from mlxcel_nb.wire.keys import DirectionKeys, direction_keys, hkdf, hkdf_expand, hkdf_extract
from tests.wire.ends import established


def test_the_rfc_s_first_case() -> None:
    prk = hkdf_extract(bytes(range(13)), b"\x0b" * 22)
    assert prk.hex() == "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5"
    okm = hkdf_expand(prk, bytes(range(0xF0, 0xFA)), 42)
    assert okm.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"


def test_the_rfc_s_third_case_without_salt_and_info() -> None:
    okm = hkdf(b"\x0b" * 22, salt=b"", info=b"", length=42)
    assert okm.hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"


@pytest.mark.parametrize("length", [0, 255 * 32 + 1])
def test_a_length_that_hkdf_cannot_give_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=str(length)):
        hkdf_expand(bytes(32), b"", length)


def test_a_further_path_shares_no_key_with_the_first_nor_with_another() -> None:
    client, server = established()
    paths = [client.path_keys(path) for path in (0, 1, 255)]
    assert [(receive, send) for send, receive in paths] == [server.path_keys(path) for path in (0, 1, 255)]
    keys = [client.send.key, client.receive.key] + [side.key for path in paths for side in path]
    assert len(set(keys)) == len(keys)


def test_path_keys_follow_the_contract_s_label() -> None:
    prk = bytes(range(32))
    keys = direction_keys(prk, b"c2s", path=7)
    assert keys == DirectionKeys(hkdf_expand(prk, b"path\x07c2s key", 32), hkdf_expand(prk, b"path\x07c2s iv", 12))


def test_keys_and_handshake_results_show_nothing() -> None:
    client, _ = established()
    shown = repr(client) + str(client) + f"{client.send!r}"
    for value in (client.prk, client.send.key, client.receive.key, client.send.iv):
        assert value.hex() not in shown and repr(value) not in shown
