"""Addresses are read as people write them, and written so that they can be read again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.cluster.address import Address, canonical_ip, parse_address
from mlxcel_nb.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:9000", "127.0.0.1", 9000),
        ("mac-1.local:0", "mac-1.local", 0),
        ("mac_1:65535", "mac_1", 65535),
        ("[::1]:9000", "::1", 9000),
        ("[fe80::1%eth0]:9000", "fe80::1%eth0", 9000),
        ("[fe80::1%en0.5]:9000", "fe80::1%en0.5", 9000),
        ("[::ffff:10.0.0.1]:9000", "::ffff:10.0.0.1", 9000),
        ("  host:1 ", "host", 1),
    ],
)
def test_an_address_is_read_and_written(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert (address.host, address.port) == (host, port)
    assert str(address) == text.strip() and parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["host", "[::1]", "::1", "10.0.0.1", "fe80::1%eth0"])
def test_a_port_may_be_left_out_where_there_is_a_default(text: str) -> None:
    assert parse_address(text, default_port=7).port == 7
    with pytest.raises(ConfigError):
        parse_address(text)


@pytest.mark.parametrize(
    "text",
    [
        "", ":", ":9000", "host:", "host:x", "host:-1", "host:65536", "host:99999999999", "host:9 0", "host:٣",
        "::1:9000:", "[::1", "[::1]9000", "[::1]:", "[host]:9000", "[1::2::3]:9", "[fe80::1%]:9", "[fe80::1%a/b]:9",
        "a b:1", "a\nb:1", "http://host:1", "user@host:1", "-host:1", "h" * 300 + ":1", "[::1]:9000\n1",
    ],
)  # fmt: skip
def test_anything_else_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_address(text)
    assert "\n" not in str(error.value)


@given(st.text(max_size=30))
def test_any_text_is_an_address_that_can_be_read_again_or_an_error(text: str) -> None:
    try:
        address = parse_address(text, default_port=1)
    except ConfigError:
        return
    assert parse_address(str(address)) == address


@given(st.ip_addresses(), st.integers(0, 65535))
def test_every_ip_address_round_trips(ip: object, port: int) -> None:
    address = Address(str(ip), port)
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("ip", "canonical"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::FFFF:0a00:0001", "10.0.0.1"),
        ("2001:0db8::0001", "2001:db8::1"),
        ("FE80::1%eth0", "fe80::1%eth0"),
    ],
)
def test_one_address_has_one_spelling(ip: str, canonical: str) -> None:
    assert canonical_ip(ip) == canonical


def test_a_name_is_no_ip_address() -> None:
    with pytest.raises(ValueError, match="host"):
        canonical_ip("host")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.0.1.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("localhost", True),
        ("LOCALHOST.", True), ("10.0.0.1", False), ("localhost.example", False), ("::", False),
    ],
)  # fmt: skip
def test_loopback_is_recognised_in_every_spelling(host: str, loopback: bool) -> None:
    """Case 46 rests on this."""
    assert Address(host, 1).is_loopback is loopback


def test_the_wildcard_is_recognised() -> None:
    assert [Address(host, 1).is_wildcard for host in ("0.0.0.0", "::", "127.0.0.1", "host")] == [
        True,
        True,
        False,
        False,
    ]


def test_a_url_is_called_one() -> None:
    with pytest.raises(ConfigError, match=r"is a URL, not an address\. Write HOST:PORT alone"):
        parse_address("http://127.0.0.1:9301/")
