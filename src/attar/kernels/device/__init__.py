"""Operators of the device runner: ``attar::*`` of torch, each with a torch body that is its definition.

Kernels of a device are registered over the bodies (registry.py). No body reads a value on the host, products
of experts aside, which read the experts that have rows.
"""
