"""The OpenAI-compatible server: HTTP in, token ids and ``SamplingParams`` out, events back as JSON or SSE.

    request → protocol → gate → words (text to tokens) → backend (the engine) → answers or streaming

Only this room imports fastapi. It talks to the engine through the Protocol of ``backend.py`` alone, so its
tests need no model.
"""
