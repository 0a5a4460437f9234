"""Solvers of unstructured pruning: each takes a weight and its Hessian, and returns the weight with exact
zeros and the kept weights corrected. One file for each."""
