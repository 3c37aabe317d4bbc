"""What MLX computes on here, and what `auto` therefore means. Any thread."""

from __future__ import annotations

CPU, GPU = "cpu", "gpu"


def kind() -> str:
    """MLX's default device."""
    import mlx.core as mx

    return CPU if mx.default_device() == mx.cpu else GPU


def settled(dtype: str, device: str) -> str:
    """`dtype` with `auto` decided: float32 on a CPU, where MLX's other products are scalar loops, else "native"."""
    return dtype if dtype != "auto" else "float32" if device == CPU else "native"
