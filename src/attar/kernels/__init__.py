"""Small compiled kernels: C++ of this room, built at first use with the system's compiler and called through
ctypes.

No kernel is needed: each has a pure fallback above this room, for machines without a compiler.
"""
