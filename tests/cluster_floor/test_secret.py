"""The cluster secret: found in one order, refused with a way to mend it, shown nowhere."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import traceback
from pathlib import Path

import pytest

from mlxcel_nb.cluster import secret as module
from mlxcel_nb.cluster.secret import (
    FILE_VARIABLE,
    VALUE_VARIABLE,
    Secret,
    Secrets,
    new_secret_file,
    random_secret,
    read_secret_file,
    resolve_secret,
    resolve_secrets,
)
from mlxcel_nb.errors import ConfigError, SecretError

GOOD = b"sixteen bytes at"


def write(path: Path, value: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(value)
    path.chmod(mode)
    return path


# ------------------------------------------------------------------------------------------------ the wrapper


def test_a_secret_is_revealed_only_when_asked() -> None:
    secret = Secret(GOOD)
    assert secret.reveal() == GOOD
    for shown in (repr(secret), str(secret), f"{secret}", f"{secret!r}", repr([secret]), repr({"s": secret})):
        assert "sixteen" not in shown
    assert repr(secret) == "<secret: 16 bytes>"
    assert not hasattr(secret, "__dict__")


def test_a_secret_is_not_pickled_or_hashed_and_its_copy_is_itself() -> None:
    secret = random_secret()
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(secret, protocol)
    with pytest.raises(TypeError):
        hash(secret)
    assert copy.copy(secret) is copy.deepcopy(secret) is secret


def test_secrets_are_compared_by_value() -> None:
    assert Secret(GOOD) == Secret(GOOD) != Secret(GOOD + b"!")
    assert Secret(GOOD) != GOOD


@pytest.mark.parametrize("size", [0, 1, 15, 4097])
def test_a_size_outside_the_limits_is_refused(size: int) -> None:
    """Case 50: empty or short is refused at start."""
    with pytest.raises(SecretError, match="mlxcel-nb secret new"):
        Secret(b"x" * size)


def test_the_limits_themselves_are_allowed_and_any_bytes_will_do() -> None:
    for value in (bytes(16), b"\xff" * 4096):
        assert Secret(value).reveal() == value


def test_random_secrets_are_32_bytes_and_differ() -> None:
    assert len(random_secret().reveal()) == 32
    assert random_secret() != random_secret()


# ------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
def test_one_line_ending_is_not_part_of_the_secret(tmp_path: Path, ending: bytes) -> None:
    assert read_secret_file(write(tmp_path / "s", GOOD + ending)).reveal() == GOOD


@pytest.mark.parametrize("ending", [b"\n\n", b"\r\n\n", b" ", b"\r"])
def test_anything_beyond_one_line_ending_is(tmp_path: Path, ending: bytes) -> None:
    """Case 50: two trailing newlines make another secret, which a peer then does not know."""
    assert read_secret_file(write(tmp_path / "s", GOOD + ending)) != Secret(GOOD)


@pytest.mark.parametrize("value", [b"", b"\n", b"fifteen bytes..", b"fifteen bytes..\n", b"x" * 4097, b"x" * 10_000])
def test_a_file_of_a_wrong_size_is_refused_by_name(tmp_path: Path, value: bytes) -> None:
    """Case 50."""
    path = write(tmp_path / "s", value)
    with pytest.raises(SecretError, match=str(path)):
        read_secret_file(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777, 0o610, 0o601])
def test_a_file_that_others_may_use_is_refused_with_the_command_that_mends_it(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "s", GOOD, mode)
    with pytest.raises(SecretError, match=f"mode {mode:03o}.*chmod 600 '{path}'"):
        read_secret_file(path)


def test_a_read_only_mount_is_let_through_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.fstatvfs

    class ReadOnly:
        def __init__(self, descriptor: int) -> None:
            self.f_flag = real(descriptor).f_flag | os.ST_RDONLY

    monkeypatch.setattr(os, "fstatvfs", ReadOnly)
    monkeypatch.setattr(module.log, "propagate", True)
    with caplog.at_level(logging.WARNING, logger="mlxcel_nb"):
        assert read_secret_file(write(tmp_path / "s", GOOD, 0o644)).reveal() == GOOD
    assert "read-only mount" in caplog.text and "sixteen" not in caplog.text


def test_a_missing_file_a_folder_and_a_pipe_are_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path, words in (
        (tmp_path / "none", "does not exist"),
        (tmp_path, "plain file|is a folder"),
        (pipe, "plain"),
    ):
        with pytest.raises(SecretError, match=words):
            read_secret_file(path)
    with pytest.raises(SecretError, match="empty"):
        read_secret_file("")


def test_a_new_file_holds_64_hexadecimal_digits_for_its_owner_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        path = new_secret_file(tmp_path / "s")
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex(path.read_text().strip())) == 32
    assert read_secret_file(path).reveal() == path.read_bytes().removesuffix(b"\n")


def test_a_file_that_exists_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "s", GOOD)
    with pytest.raises(SecretError, match="exists already"):
        new_secret_file(path)
    assert path.read_bytes() == GOOD
    with pytest.raises(SecretError, match="cannot be made"):
        new_secret_file(tmp_path / "none" / "s")


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert new_secret_file("~/s") == tmp_path / "s"
    assert len(read_secret_file("~/s").reveal()) == 64


# ------------------------------------------------------------------------------------------------ the order


def test_the_first_place_that_names_a_secret_wins(tmp_path: Path) -> None:
    files = {name: write(tmp_path / name, f"the secret of {name}".encode()) for name in ("option", "variable", "toml")}
    environ = {FILE_VARIABLE: str(files["variable"]), VALUE_VARIABLE: "the secret of value\n"}

    def found(**places: object) -> bytes:
        secret = resolve_secret(**places)  # type: ignore[arg-type]
        assert secret is not None
        return secret.reveal().removeprefix(b"the secret of ")

    assert found(file=files["option"], toml_file=files["toml"], environ=environ) == b"option"
    assert found(toml_file=files["toml"], environ=environ) == b"variable"
    del environ[FILE_VARIABLE]
    assert found(toml_file=files["toml"], environ=environ) == b"value"
    assert found(toml_file=files["toml"], environ={}) == b"toml"
    assert resolve_secret(environ={}) is None


@pytest.mark.parametrize("environ", [{VALUE_VARIABLE: ""}, {VALUE_VARIABLE: "short"}, {FILE_VARIABLE: ""}], ids=str)
def test_a_bad_secret_is_an_error_and_no_later_place_is_tried(tmp_path: Path, environ: dict[str, str]) -> None:
    """Case 50: empty or short is refused, not skipped."""
    good = write(tmp_path / "s", GOOD)
    with pytest.raises(SecretError, match=r"MLXCEL_CLUSTER_SECRET|path of the secret file"):
        resolve_secret(toml_file=good, environ=environ)


def test_a_variable_s_bytes_survive() -> None:
    value = os.fsdecode(b"\xff\xfe sixteen bytes \xff")
    secret = resolve_secret(environ={VALUE_VARIABLE: value})
    assert secret is not None and secret.reveal() == b"\xff\xfe sixteen bytes \xff"


def test_no_error_or_traceback_quotes_a_secret(tmp_path: Path) -> None:
    short = bytes(range(97, 110))
    for attempt in (
        lambda: Secret(short),
        lambda: read_secret_file(write(tmp_path / "s", short)),
        lambda: resolve_secret(environ={VALUE_VARIABLE: short.decode()}),
        lambda: read_secret_file(write(tmp_path / "t", short * 400)),
    ):
        with pytest.raises(ConfigError) as error:
            attempt()
        assert short.decode() not in "".join(traceback.format_exception(error.value))


# ------------------------------------------------------------------------------------------------ two of them


def test_an_older_secret_comes_from_the_option_or_else_the_cluster_file(tmp_path: Path) -> None:
    new, old, oldest = (write(tmp_path / name, GOOD + name.encode()) for name in ("new", "old", "oldest"))
    found = resolve_secrets(file=new, toml_previous_file=old, environ={})
    assert found == Secrets(Secret(GOOD + b"new"), Secret(GOOD + b"old"))
    found = resolve_secrets(file=new, previous_file=oldest, toml_previous_file=old, environ={})
    assert found is not None and found.previous == Secret(GOOD + b"oldest")
    assert resolve_secrets(toml_file=new, environ={}) == Secrets(Secret(GOOD + b"new"))
    assert resolve_secrets(previous_file=old, environ={}) is None
    with pytest.raises(SecretError, match="does not exist"):
        resolve_secrets(file=new, previous_file=tmp_path / "nowhere", environ={})


def test_secrets_are_the_current_one_and_then_the_older_one() -> None:
    one, other = Secret(GOOD), Secret(GOOD + b"!")
    assert list(Secrets(one)) == [one]
    assert list(Secrets(one, other)) == [one, other]
    assert GOOD.decode() not in repr(Secrets(one, other))


def test_the_secret_that_gives_way_stays_good_until_the_same_is_read_again() -> None:
    a, b, c = (Secret(GOOD + letter) for letter in (b"a", b"b", b"c"))
    assert Secrets(a).renewed(Secrets(b)) == Secrets(b, a)
    assert Secrets(b, a).renewed(Secrets(b)) == Secrets(b)
    assert Secrets(a).renewed(Secrets(a)) == Secrets(a)
    assert Secrets(a).renewed(Secrets(b, c)) == Secrets(b, c), "what is named counts"
    assert Secrets(b, a).renewed(Secrets(c)) == Secrets(c, b), "two at most"
