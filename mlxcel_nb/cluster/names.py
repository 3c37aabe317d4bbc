"""Names that travel: clusters, nodes, roles, and the random ids made for them.

Pure but for the random source; callable from any thread. Input comes from users and, through the handshake, from
peers that have proved nothing yet, so the checks here are the only trust these strings ever get. Users are held to
more than the wire asks for: a name that is easily mistaken for another should not come into use.
"""

from __future__ import annotations

import secrets
import unicodedata

from mlxcel_nb.errors import ConfigError

MAX_NAME = 128
"""Bytes of UTF-8 in a cluster name or a node id."""

MAX_ROLE = 32
"""Bytes of UTF-8 in a role."""

INCARNATION_BYTES = 16


def has_control(value: str) -> bool:
    """Whether any character would steer a terminal or a log (Unicode category Cc)."""
    return any(unicodedata.category(character) == "Cc" for character in value)


def check_name(what: str, value: str, *, limit: int = MAX_NAME) -> str:
    """`value` itself when it may name a `what`; `ConfigError` otherwise."""
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"{what} is not valid Unicode") from None
    if not 1 <= size <= limit:
        raise ConfigError(f"{what} has {size} bytes of UTF-8; 1 to {limit} are allowed")
    if has_control(value):
        raise ConfigError(f"{what} {value!r} holds a control character", advice="Use printable text.")
    return value


def check_given_name(what: str, value: str) -> str:
    """`value` itself when a user may name a `what` so: as `check_name`, all of it visible, no space at either end."""
    check_name(what, value)
    if not value.isprintable():
        raise ConfigError(f"{what} {value!r} holds a character that cannot be seen", advice="Use printable text.")
    if value != value.strip():
        raise ConfigError(f"{what} {value!r} begins or ends with a space", advice="Take it away.")
    return value


def check_role(value: str) -> str:
    """`value` itself when it may be a role's name."""
    return check_name("role", value, limit=MAX_ROLE)


def new_incarnation() -> bytes:
    """Sixteen random bytes, drawn once per process start, by which peers notice a restart."""
    return secrets.token_bytes(INCARNATION_BYTES)


def visitor_id() -> str:
    """Node id of a command-line visitor."""
    return f"ping-{secrets.token_hex(4)}"


def listener_id() -> str:
    """Node id of a command-line listener."""
    return f"listen-{secrets.token_hex(4)}"


def router_id() -> str:
    """Node id of one notebook kernel."""
    return f"router-{secrets.token_hex(4)}"
