"""What is done to the float model before rounding: channels scaled, the residual stream rotated."""
