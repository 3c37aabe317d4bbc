"""Names are short, printable, and valid UTF-8."""

from __future__ import annotations

import re

import pytest

from mlxcel_nb.cluster.names import check_given_name, check_name, check_role, new_incarnation, router_id, visitor_id
from mlxcel_nb.errors import ConfigError


@pytest.mark.parametrize("name", ["a", "mlxcel", "node-a", "x" * 128, "é" * 64, "Büro №1 🙂", " "])
def test_what_people_write_is_a_name(name: str) -> None:
    assert check_name("node id", name) == name


@pytest.mark.parametrize("name", ["", "x" * 129, "é" * 65, "a\nb", "a\0", "\x1b[2J", "a\x7f", "a\x9b", "\ud800"])
def test_empty_long_or_unprintable_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="node id") as error:
        check_name("node id", name)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (" a", "a space"),
        ("a ", "a space"),
        (" ", "a space"),
        ("a\u200bb", "seen"),
        ("a\u202eb", "seen"),
        ("\xa0a", "seen"),
    ],
)
def test_what_is_easily_mistaken_for_another_name_may_travel_but_not_be_given(name: str, says: str) -> None:
    assert check_name("node id", name) == name
    with pytest.raises(ConfigError, match=says) as error:
        check_given_name("node id", name)
    assert str(error.value).isprintable()
    assert check_given_name("node id", "Büro №1 🙂") == "Büro №1 🙂"


def test_roles_are_shorter() -> None:
    assert check_role("r" * 32) == "r" * 32
    for role in ("", "r" * 33):
        with pytest.raises(ConfigError, match="role"):
            check_role(role)


def test_ids_made_here_are_fresh_and_say_what_they_are() -> None:
    assert re.fullmatch(r"ping-[0-9a-f]{8}", visitor_id())
    assert re.fullmatch(r"router-[0-9a-f]{8}", router_id())
    assert visitor_id() != visitor_id() and router_id() != router_id()
    assert len(new_incarnation()) == 16 and new_incarnation() != new_incarnation()
