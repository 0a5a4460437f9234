"""Bits for each layer: measured sensitivities, and the choice under a budget."""
