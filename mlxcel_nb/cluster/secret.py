"""The cluster secret: where it comes from, and a wrapper that keeps it from being shown.

Everything that holds the secret for longer than a call holds a `Secret`, whose repr, str, format and pickle give
nothing away; while a secret is replaced by another, both travel together as `Secrets`. Files are read on the caller's
thread. No error text here contains secret bytes.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mlxcel_nb.errors import SecretError
from mlxcel_nb.util.log import get_logger

MIN_BYTES = 16
MAX_BYTES = 4096
RANDOM_BYTES = 32

FILE_VARIABLE = "MLXCEL_CLUSTER_SECRET_FILE"
VALUE_VARIABLE = "MLXCEL_CLUSTER_SECRET"

_HOW_TO_MAKE = "Make one with: mlxcel-nb secret new FILE"

log = get_logger("cluster.secret")


class Secret:
    """Secret bytes that only `reveal` gives out."""

    __slots__ = ("__value",)

    def __init__(self, value: bytes, *, source: str = "the cluster secret") -> None:
        if not value:
            raise SecretError(f"{source} is empty", advice=_HOW_TO_MAKE)
        if len(value) < MIN_BYTES:
            raise SecretError(f"{source} has {len(value)} bytes; at least {MIN_BYTES} are needed", advice=_HOW_TO_MAKE)
        if len(value) > MAX_BYTES:
            raise SecretError(f"{source} has more than {MAX_BYTES} bytes", advice=_HOW_TO_MAKE)
        self.__value = bytes(value)

    def reveal(self) -> bytes:
        """The bytes themselves, for the key derivation."""
        return self.__value

    def __repr__(self) -> str:
        return f"<secret: {len(self.__value)} bytes>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self.__value, other.__value)

    __hash__ = None  # type: ignore[assignment]  # a hash would be a function of the secret that containers print

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a cluster secret is not pickled; seal it to the engine's key instead")


@dataclass(frozen=True)
class Secrets:
    """The cluster secret, and an older one that is still good while the first takes its place."""

    current: Secret
    previous: Secret | None = None

    def __iter__(self) -> Iterator[Secret]:
        """The current one, then the older one."""
        yield self.current
        if self.previous is not None:
            yield self.previous

    def renewed(self, read: Secrets) -> Secrets:
        """What is good once a node that holds these has read `read` from the same places.

        The secret that gives way to a new one stays good where no older one is named, for nodes change one after the
        other. It is dropped when the same is read again.
        """
        if read.previous is None and read.current != self.current:
            return Secrets(read.current, self.current)
        return read


def random_secret() -> Secret:
    """A fresh secret of 32 random bytes, for a cluster that was given none."""
    return Secret(secrets.token_bytes(RANDOM_BYTES))


def read_secret_file(path: str | os.PathLike[str]) -> Secret:
    """The secret in the file at `path`, less one line ending.

    Raises:
        SecretError: unreadable, not a plain file, readable by group or others, empty, too short or too long.
    """
    where = Path(path).expanduser()
    shown = repr(os.fspath(path))
    name = f"secret file {shown}"
    if not os.fspath(path):
        raise SecretError("the path of the secret file is empty", advice=_HOW_TO_MAKE)
    try:
        # Without O_NONBLOCK, a path that is a pipe would hold the start up for ever.
        descriptor = os.open(where, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(descriptor, "rb") as file:
            _check_mode(shown, file.fileno())
            value = file.read(MAX_BYTES + 3)
    except FileNotFoundError:
        raise SecretError(f"{name} does not exist", advice=_HOW_TO_MAKE) from None
    except IsADirectoryError:
        raise SecretError(f"{name} is a folder", advice="Give the path of the file in it.") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SecretError(f"{name} cannot be read: {reason}", advice="Check its owner, and chmod 600 it.") from None
    return Secret(_without_line_ending(value), source=name)


def resolve_secret(
    *,
    file: str | os.PathLike[str] | None = None,
    toml_file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Secret | None:
    """The secret from the first place that names one, or None where no place does.

    The places in order: the option's `file`, the variable that names a file, the variable that holds the secret,
    the cluster file's `toml_file`. A place that names a bad secret is an error; later ones are not tried.
    """
    if file is not None:
        return read_secret_file(file)
    if (named := environ.get(FILE_VARIABLE)) is not None:
        return read_secret_file(named)
    if (value := environ.get(VALUE_VARIABLE)) is not None:
        return Secret(_without_line_ending(os.fsencode(value)), source=VALUE_VARIABLE)
    return None if toml_file is None else read_secret_file(toml_file)


def resolve_secrets(
    *,
    file: str | os.PathLike[str] | None = None,
    previous_file: str | os.PathLike[str] | None = None,
    toml_file: str | os.PathLike[str] | None = None,
    toml_previous_file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Secrets | None:
    """The secret as `resolve_secret` finds it, with the older one that an option or the cluster file names."""
    current = resolve_secret(file=file, toml_file=toml_file, environ=environ)
    if current is None:
        return None
    older = toml_previous_file if previous_file is None else previous_file
    return Secrets(current, None if older is None else read_secret_file(older))


def new_secret_file(path: str | os.PathLike[str]) -> Path:
    """Write a fresh random secret in hexadecimal to a new file that only its owner may read.

    Raises:
        SecretError: when the file exists already or cannot be written; nothing half-written stays behind.
    """
    where = Path(path).expanduser()
    name = f"secret file {os.fspath(path)!r}"
    text = secrets.token_hex(RANDOM_BYTES) + "\n"
    try:
        descriptor = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise SecretError(f"{name} exists already and is left alone", advice="Choose a new name.") from None
    except OSError as error:
        raise SecretError(f"{name} cannot be made: {error.strerror}", advice="Choose a folder you may write.") from None
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        where.unlink(missing_ok=True)
        raise SecretError(f"{name} cannot be written: {error.strerror}") from None
    return where


def _without_line_ending(value: bytes) -> bytes:
    if value.endswith(b"\r\n"):
        return value[:-2]
    return value[:-1] if value.endswith(b"\n") else value


def _check_mode(shown: str, descriptor: int) -> None:
    name = f"secret file {shown}"
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise SecretError(f"{name} is not a plain file", advice="Put the secret into a file with mode 600.")
    if os.name != "posix" or not status.st_mode & 0o077:
        return
    mode = stat.S_IMODE(status.st_mode)
    if os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
        # Kubernetes mounts secrets so, with a mode the user of the container cannot choose.
        log.warning(
            "%s has mode %03o on a read-only mount: accepted, though others on this host may read it", name, mode
        )
        return
    raise SecretError(f"{name} may be read by others (mode {mode:03o})", advice=f"Run: chmod 600 {shown}")
