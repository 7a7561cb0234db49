"""Which types of numbers do formats name, and by which numbers of their own?"""

from __future__ import annotations

__all__ = ["LITDATA_NUMPY", "LITDATA_TORCH", "NUMBER_TYPES"]

NUMBER_TYPES = (
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
)  # fmt: skip
"""By numpy's names."""

LITDATA_TORCH = {
    0: "float32", 1: "float32", 2: "float64", 3: "float64", 8: "float16", 9: "float16", 11: "uint8", 12: "int8",
    13: "int16", 14: "int16", 15: "int32", 16: "int32", 17: "int64", 18: "int64", 19: "bool", 20: "uint16",
}  # fmt: skip
"""Of tensors in LitData's chunks; what is left out has no type in numpy."""
LITDATA_NUMPY = {
    0: "int8", 1: "int16", 2: "int32", 3: "int64", 4: "uint8", 5: "uint16", 6: "uint32", 7: "uint64", 8: "float16",
    9: "float32", 10: "float64", 13: "bool",
}  # fmt: skip
"""Of arrays; what is left out is no number, or a complex one."""
