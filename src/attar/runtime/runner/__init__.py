"""Runners: what turns a step into logits (the protocol ``Runner`` is in ``step.py``)."""
