"""Quantization: grids (number formats), roundings (algorithms), and the verb that applies them."""
