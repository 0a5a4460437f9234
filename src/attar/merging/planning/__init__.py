"""A merge worked out from headers: which stored tensors become which tensor of the result."""
