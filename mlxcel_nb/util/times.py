"""The one table of times, in seconds: code, docs and tests read the same figures."""

from __future__ import annotations

HANDSHAKE_S = 5.0
"""From accept to proof."""

PING_S = 1.0
"""An idle link is pinged this often."""

PROBE_S = 1.0
"""Within this time the holder of a node id shows life, or its place goes to a newer process."""

SUSPECT_S = 3.0
"""Without a sign of life a link's peer is shown as suspect."""

DEAD_S = 6.0
"""Silence after which the link's witness calls its peer dead; a reset and one failed reconnect do so at once."""

HEARTBEAT_S = 5.0
HEARTBEAT_MISSES = 3

FRAME_REST_S = 10.0
"""Once a frame has begun, its rest arrives within this time."""

STEP_S = 30.0
"""A step without progress fails after this; configurable."""

ORPHAN_S = 15.0
"""An engine that no router has been connected to for this long ends itself."""
