"""The runtime: a paged KV cache, a scheduler, runners, sampling and the engine that joins them.

    request → scheduler → step → runner → logits → sampling → scheduler

The scheduler and the block manager know integers only: no torch, no model. A runner sees only a ``StepInput``
(``step.py``): tokens, positions, slots.
"""
