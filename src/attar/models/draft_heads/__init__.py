"""Draft heads: small trained modules that read hidden states of a target and propose its next tokens.

One file each has the module; training is in ``distillation/heads/``, drafting in
``runtime/speculate/heads/``, the layouts of other tools in ``formats/draft_heads/``.
"""
