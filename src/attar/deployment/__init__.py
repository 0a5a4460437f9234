"""Deployment: a checkpoint as files that other engines load, each read back and compared.

The verb ``export`` (stage.py) on top of the formats, which know bytes, and of quantization, which knows how
weights are rounded; what a file needs besides the weights (importance.py, imatrix.py) and which type each
tensor gets under a budget (gguf_type_search.py) is found here.
"""
