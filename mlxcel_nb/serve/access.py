"""Who may use the API: decisions on a request's headers. Pure.

On loopback a web page is what to beware of: it may send requests from the user's own browser, under a name of its own
that leads to 127.0.0.1 (DNS rebinding), or plainly across origins. So a request's Host must be a name of this
computer's own, and an Origin, which browsers add, must be the same place or one that the user allowed. Elsewhere a key
is needed, which no page has.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.errors import ConfigError, SecretError
from mlxcel_nb.serve.failures import ApiError

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+(?:%25\w+)?\]|[^:\[\]@/\s]+)(?::(?P<port>\d{1,5}))?")

_KEY = re.compile(rb"[\x21-\x7e]+")
"""What fits behind "Bearer "."""


@dataclass(frozen=True)
class Access:
    """The rules of one server.

    Args:
        host: the name or address that it was bound to.
        local: it listens on loopback alone.
        key: what callers have to show; None lets everybody in who can reach it.
        origins: of web pages that may use it, as "http://localhost:8888".
    """

    host: str
    local: bool
    key: Secret | None = None
    origins: Sequence[str] = ()
    _digest: bytes | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.key is None and not self.local:
            raise ConfigError(
                f"--host {self.host} lets other computers in, and there is no key",
                advice="Give --api-key-file FILE; make one with: mlxcel-nb secret new FILE",
            )
        if self.key is not None:
            if not _KEY.fullmatch(self.key.reveal()):
                raise SecretError("an API key is letters, digits and signs, without spaces", advice=_HOW)
            object.__setattr__(self, "_digest", _digest(self.key.reveal()))
        for origin in self.origins:
            check_origin(origin)

    def check_host(self, host: str | None) -> None:
        """Refuse a name that is none of this computer's own. Who has a key may call it as he likes.

        Raises:
            ApiError
        """
        match = _HOST.fullmatch(host or "")
        if match is None:
            raise ApiError(400, "the request's Host header is missing or malformed", code="bad_host")
        if self.local and not self._is_ours(match["name"]):
            what = f"the name {match['name']!r:.80} is not one of this server's"
            raise ApiError(403, f"{what}; use localhost or 127.0.0.1", code="host_not_allowed")

    def allows_origin(self, origin: str, host: str) -> bool:
        """Whether a page from `origin` may: it is this server's own, or allowed by name."""
        if origin in self.origins:
            return True
        try:
            there = urlsplit(origin)
        except ValueError:
            return False
        default = {"http": 80, "https": 443}.get(there.scheme)
        match = _HOST.fullmatch(host)
        if default is None or match is None or not there.hostname:
            return False
        try:
            ports = there.port or default, int(match["port"] or default)
        except ValueError:
            return False
        return there.hostname.lower() == match["name"].strip("[]").lower() and ports[0] == ports[1]

    def check_origin(self, origin: str | None, host: str) -> None:
        """Refuse a web page from elsewhere. Programs that are no browsers send no origin."""
        if origin is not None and not self.allows_origin(origin, host):
            how = f"start it with --allow-origin {origin:.100} if they should"
            if not is_origin(origin):  # "null": a file, or a frame without rights
                how = "only those of an http or https address can be let in"
            raise ApiError(403, f"web pages from {origin!r:.100} may not use this server; {how}", code="origin")

    def check_key(self, headers: Mapping[str, str]) -> None:
        """Compare in a time that tells nothing of the key.

        Raises:
            ApiError: none was given, or another one.
        """
        if self._digest is None:
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        challenge = {"www-authenticate": "Bearer"}
        if kind.lower() != "bearer" or not given:
            what = "a key is needed: send it as Authorization: Bearer KEY"
            raise ApiError(401, what, code="missing_api_key", headers=challenge)
        if not hmac.compare_digest(_digest(given.strip().encode("latin-1", "replace")), self._digest):
            raise ApiError(401, "the key is not this server's", code="invalid_api_key", headers=challenge)

    def _is_ours(self, name: str) -> bool:
        name = name.strip("[]").rstrip(".").lower()
        return name in ("localhost", self.host.strip("[]").lower()) or is_loopback(name)


_HOW = "Make one with: mlxcel-nb secret new FILE"


def _digest(key: bytes) -> bytes:
    """Of one length, whatever the key's."""
    return hashlib.sha256(key).digest()


def is_loopback(host: str) -> bool:
    """Whether `host` can only be this computer."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.rstrip(".").lower() == "localhost"


def is_origin(origin: str) -> bool:
    """Whether a browser sends this as the origin of pages from some address."""
    try:
        parts = urlsplit(origin)
        _ = parts.port
    except ValueError:
        return False
    whole = f"{parts.scheme}://{parts.netloc}" == origin
    return parts.scheme in ("http", "https") and bool(parts.hostname) and whole


def check_origin(origin: str) -> None:
    """Refuse what no browser would send as an origin.

    Raises:
        ConfigError
    """
    if not is_origin(origin):
        advice = "As in: --allow-origin http://localhost:8888, with nothing after it, not even a slash."
        raise ConfigError(f"{origin!r} is no origin", advice=advice)
