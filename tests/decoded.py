"""Checkpoints as dense tensors."""

from attar.formats.readers import Decoded


def dequantize_state(checkpoint):
    """Every tensor of a checkpoint, decoded, under the names of the unquantized model."""
    decoded = Decoded(checkpoint)
    return {name: decoded.load(name) for name in decoded.tensors}
