"""Beacons of anybody, some of whom know the key, on a clock of the script's."""

from __future__ import annotations

import hmac

from mlxcel_nb.wire import beacon
from mlxcel_nb.wire.fields import printable
from tests.fuzz.script import Script, bend

BEACON = b"b" * 32


def beacons(data: bytes) -> None:
    """Datagrams from anybody, some of whom know the key, on a clock of the script's."""
    script = Script(data)
    heard = beacon.BeaconFilter("fuzz", [BEACON, b"o" * 32])
    now_ms = 1_700_000_000_000
    count = believed = 0
    while script and count < 4:
        form = script.number()
        now_ms += script.number(2) if form & 4 else 0
        datagram = script.long() if form & 1 else _datagram(script, form, now_ms)
        if form & 2 == 0:
            key = b"o" * 32 if form & 8 else BEACON
            datagram += hmac.digest(key, datagram, "sha256")
        count += 1
        accepted = heard.accept(datagram, now_ms)
        if accepted is not None:
            believed += 1
            assert accepted.cluster == "fuzz" and abs(accepted.time_ms - now_ms) <= beacon.WINDOW_MS
            assert len(datagram) <= beacon.MAX_BYTES
            assert beacon.encode(accepted, b"o" * 32 if form & 8 else BEACON) == datagram
            assert heard.accept(datagram, now_ms) is None, "the same one twice"
        assert heard.report is None or printable(heard.report) == heard.report, heard.report
    assert len(heard._seen) <= believed


def _datagram(script: Script, form: int, now_ms: int) -> bytes:
    time_ms = now_ms + script.number(3) - (1 << 23) if form & 16 else now_ms
    body = b"".join((
        b"MXNB\0\5\x10\0", time_ms.to_bytes(8, "big"), script.take(2).ljust(16, b"n"), b"i" * 16,
        b"\4fuzz" if form & 32 == 0 else script.short().join([b"\3", b""]),
    ))  # fmt: skip
    for _ in range(2):
        text = script.short()
        body += bytes([len(text)]) + text
    count = script.number()
    body += bytes([count])
    for _ in range(count & 7):
        text = script.short()
        body += bytes([len(text)]) + text
    return bend(script, body) if form & 64 else body
