"""C++ kernels, compiled at first use with the system's compiler and called through ctypes; operators of
torch for GPUs (device/) and their kernels (triton/).

Every C++ kernel has a fallback in torch outside this package, for machines without a compiler.
"""
