"""Embeddings, scores of pairs and reranking: /v1/embeddings, /v1/score, /v1/rerank.

    encoder, causal with --pooling        text → embedding (embedders.py) → cosine of two
    classifier of one label               pair → sigmoid of its logit
    causal                                pair → log p of the second text after the first

Texts are embedded a slice at a time, outside of the event loop, under the same admission as completions.
"""
