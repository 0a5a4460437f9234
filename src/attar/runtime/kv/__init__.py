"""The KV cache: who owns which block (``blocks``, ``table``, ``radix``, ``manager``), what it costs
(``layout``), the tensors themselves (``pool``, ``store``), and which tokens are let go (``evict``).
"""
