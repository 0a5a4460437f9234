"""Transforms of the float model before rounding: channels scaled, the residual stream rotated."""
