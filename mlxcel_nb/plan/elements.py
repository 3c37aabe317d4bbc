"""How many bytes one element of a tensor in a model's files takes, for the plan and the loader alike. Pure."""

from __future__ import annotations

ITEM_SIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "BOOL": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
}  # fmt: skip
"""Bytes of one element, by the name safetensors gives a dtype."""
