"""The parts of a model, found by probing it: blocks, projections, norms, heads, the residual stream."""
