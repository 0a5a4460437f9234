"""The KV cache: who owns which block (``blocks``, ``table``, ``radix``, ``manager``), the memory of blocks
(``layout``), the tensors themselves (``pool``, ``store``), and which tokens are let go (``evict``).
"""
