"""From logits to tokens: parameters, penalties, warped distributions, draws, stop strings, text."""
