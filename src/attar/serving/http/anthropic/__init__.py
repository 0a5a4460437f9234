"""Anthropic's Messages API: /v1/messages, /v1/messages/count_tokens, and its form of /v1/models.

blocks of content → messages (messages.py) → the same prompt and engine as chat completions
items of the answer → blocks of content, whole or as events (output.py)
"""
