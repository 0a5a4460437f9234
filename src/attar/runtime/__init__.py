"""The runtime: one KV cache, a scheduler, runners, sampling and the engine that joins them.

    request → scheduler → step → runner → logits → sampling → scheduler

Bookkeeping (``kv/blocks.py``, ``table.py``, ``prefix_tree.py``, ``block_manager.py``; ``sequence.py``, ``queue.py``,
``scheduler.py``) knows integers only: no torch, no model. A runner sees only a ``Step`` (``step.py``):
tokens, positions and slots.
"""
