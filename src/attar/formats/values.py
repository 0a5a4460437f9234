"""What codes stand for: (code - zero) * scale of the group of each input, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from attar.formats.coded import Coded


def dequantize(weight: Coded, width: int) -> Tensor:
    """The weight of integer codes, float32 (N, K); exact where a scale has at most 15 significant bits.

    Args:
        weight: the codes; not changed.
        width: inputs that share a scale; nothing to the codes where each input names its group.
    """
    if weight.order is not None:
        order = weight.order.long()
        scale, zero = weight.scale[:, order], None if weight.zero is None else weight.zero[:, order]
        return (weight.codes if zero is None else weight.codes - zero) * scale
    rows, columns = weight.codes.shape
    tiled = torch.nn.functional.pad(weight.codes.float(), (0, -columns % width)).reshape(rows, -1, width)
    if weight.zero is not None:
        tiled = tiled - weight.zero[..., None]
    return (tiled * weight.scale[..., None]).reshape(rows, -1)[:, :columns].contiguous()
