"""Case 66: whom a server lets in, by a request's headers."""

from __future__ import annotations

import pytest

from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.errors import ConfigError, SecretError
from mlxcel_nb.serve.access import Access
from mlxcel_nb.serve.failures import ApiError

HERE = Access("127.0.0.1", True)
KEY = "k" * 32
LOCKED = Access("192.0.2.1", False, Secret(KEY.encode()))


def status(check: object, *args: object) -> int:
    try:
        check(*args)  # type: ignore[operator]
    except ApiError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000", "[::1]", "localhost."],
)
def test_names_of_this_computer_are_let_in(host: str) -> None:
    assert status(HERE.check_host, host) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.1.evil.example", "192.0.2.1", "[2001:db8::1]"],
)
def test_a_name_that_somebody_else_may_own_is_not_let_in(host: str) -> None:
    assert status(HERE.check_host, host) == 403


@pytest.mark.parametrize("host", [None, "", "a b", "user@localhost", "localhost:8000:1", "localhost:port", "[::1"])
def test_a_host_that_is_none_is_refused(host: str | None) -> None:
    assert status(HERE.check_host, host) == 400
    assert status(LOCKED.check_host, host) == 400


def test_who_has_a_key_may_call_the_server_as_he_likes() -> None:
    assert status(LOCKED.check_host, "models.example:8000") == 200


@pytest.mark.parametrize(
    ("origin", "host", "expected"),
    [
        (None, "localhost:8000", 200),
        ("http://localhost:8000", "localhost:8000", 200),
        ("https://localhost", "localhost:443", 200),
        ("http://[::1]:8000", "[::1]:8000", 200),
        ("http://localhost", "localhost", 200),
        ("http://localhost:8888", "localhost:8000", 403),
        ("http://127.0.0.1:8000", "localhost:8000", 403),
        ("http://evil.example", "localhost:8000", 403),
        ("http://evil.example:8000", "localhost:8000", 403),
        ("null", "localhost:8000", 403),
        ("", "localhost:8000", 403),
        ("file://", "localhost:8000", 403),
        ("http://localhost:99999", "localhost:8000", 403),
    ],
)
def test_a_page_from_elsewhere_is_not_let_in(origin: str | None, host: str, expected: int) -> None:
    assert status(HERE.check_origin, origin, host) == expected


def test_a_page_may_be_allowed_by_name() -> None:
    access = Access("127.0.0.1", True, None, ("http://localhost:8888",))
    assert status(access.check_origin, "http://localhost:8888", "localhost:8000") == 200
    assert status(access.check_origin, "http://localhost:8889", "localhost:8000") == 403


@pytest.mark.parametrize("origin", ["localhost:8888", "http://a/", "http://a/path", "ftp://a", "*", "", "http://a:x"])
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ConfigError):
        Access("127.0.0.1", True, None, (origin,))


def test_beyond_this_computer_there_is_a_key() -> None:
    with pytest.raises(ConfigError, match="--api-key-file"):
        Access("192.0.2.1", False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (f"Bearer {KEY}", 200),
        (f"bearer {KEY}", 200),
        (None, 401),
        ("", 401),
        (KEY, 401),
        (f"Basic {KEY}", 401),
        (f"Bearer {KEY[:-1]}", 401),
        (f"Bearer {KEY}x", 401),
        ("Bearer ", 401),
        ("Bearer \xff\u2603", 401),
    ],
)
def test_the_key_is_the_whole_key(given: str | None, expected: int) -> None:
    headers = {} if given is None else {"authorization": given}
    assert status(LOCKED.check_key, headers) == expected


def test_no_error_and_no_repr_shows_the_key() -> None:
    with pytest.raises(ApiError) as caught:
        LOCKED.check_key({"authorization": "Bearer nearly-" + KEY})
    assert KEY not in repr(LOCKED) + str(caught.value) + repr(caught.value.body())


def test_a_key_that_fits_into_no_header_is_refused() -> None:
    with pytest.raises(SecretError):
        Access("127.0.0.1", True, Secret(b"sixteen bytes or more"))
