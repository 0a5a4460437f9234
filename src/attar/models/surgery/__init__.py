"""A smaller model: what may be cut, what a cut costs, and the cut itself."""
