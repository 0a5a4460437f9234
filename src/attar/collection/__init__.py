"""Black-box teachers: prompts are sent, answers are kept, and a student learns from their text.

    prompts + system prompts → requests (each with a hash) → teacher, unless the journal has the answer
                             → journal → filters → data.jsonl

A teacher is an endpoint that speaks OpenAI's API (``teachers/endpoint.py``) or a checkpoint
(``teachers/local.py``). Only answers are kept, so any teacher that writes text will do: knowledge
distillation in its weakest and most portable form (sequence-level, Kim and Rush 2016, arXiv 1606.07947).
"""
