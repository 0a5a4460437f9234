"""OpenAI's /v1/responses: the part that people use.

input items → messages (items.py) → the same prompt and engine as chat completions
pieces of the answer → output items, whole or as events (output.py)
store.py    responses that a next request goes on from, bounded, in memory
"""
