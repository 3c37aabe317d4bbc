"""Flow control by counting: how many frames of kinds 4 to 6 a channel may still carry.

Pure; each object belongs to the thread that owns its direction. A receiver grants anew once its reader has taken
frames off, so what is in flight stays bounded even when the reader sleeps.
"""

from __future__ import annotations

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire.frames import Kind

INITIAL = 64
MAX_GRANTED = (1 << 32) - 1
MAX_CHANNELS = 4096
"""A peer cannot make us count on more channels than this."""

COUNTED = frozenset({Kind.TENSOR, Kind.KV, Kind.STREAM})


class Window:
    """What one channel may still carry."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = INITIAL

    def spend(self) -> bool:
        """Count one frame; False, and nothing counted, when the channel has to wait."""
        left = self.left
        if left:
            self.left = left - 1
        return left > 0


class SendCredits:
    """The sender's side."""

    def __init__(self) -> None:
        self._windows: dict[int, Window] = {}

    def left(self, channel: int) -> int:
        window = self._windows.get(channel)
        return INITIAL if window is None else window.left

    def window(self, channel: int) -> Window:
        """The window of `channel`, for whoever sends on one again and again."""
        return self._windows.get(channel) or self._windows.setdefault(channel, Window())

    def spend(self, channel: int) -> bool:
        """Count one frame; False, and nothing counted, when the channel has to wait."""
        return self.window(channel).spend()

    def grant(self, channel: int, count: int) -> None:
        """The peer sent a credit frame."""
        if not count:
            return
        left = self.left(channel) + count
        if left > MAX_GRANTED:
            raise WireError(f"credit of {left} frames on channel {channel}")
        if channel not in self._windows and len(self._windows) >= MAX_CHANNELS:
            raise WireError(f"credit on more than {MAX_CHANNELS} channels")
        self.window(channel).left = left


class ReceiveCredits:
    """The receiver's side: refuses frames beyond what was granted, and says when to grant more.

    Args:
        window: frames a channel may have in flight.
    """

    def __init__(self, window: int = INITIAL) -> None:
        self._half = max(1, window // 2)
        self._left: dict[int, int] = {}
        self._taken: dict[int, int] = {}

    def received(self, channel: int) -> None:
        """A counted frame arrived."""
        left = self._left.get(channel)
        if left is None:
            if len(self._left) >= MAX_CHANNELS:
                raise WireError(f"frames on more than {MAX_CHANNELS} channels")
            left = INITIAL
        if not left:
            raise WireError(f"a frame beyond the credit of channel {channel}")
        self._left[channel] = left - 1

    def taken(self, channel: int) -> int:
        """The reader took one frame; how many to grant now, which is 0 until half a window has gathered."""
        taken = self._taken.get(channel, 0) + 1
        if taken < self._half:
            self._taken[channel] = taken
            return 0
        self._taken[channel] = 0
        self._left[channel] = self._left.get(channel, INITIAL) + taken
        return taken
