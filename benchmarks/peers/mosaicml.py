"""How does MosaicML Streaming import without CUDA? As torchvision does, once two of its operators are declared.

``import streaming`` imports torchvision for its ready-made vision datasets. torchvision's wheel is built for CUDA's
torch: beside a CPU build its compiled operators stay out, and its import fails at the two that it describes to torch
by name. Declared without a body, which nobody calls here, they let everything else of it import as it is.
"""

from __future__ import annotations

import torch

for operator in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, operator):
        torch.library.define(f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")

import streaming  # noqa: E402

__all__ = ["streaming"]
