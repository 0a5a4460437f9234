"""Ollama's API under /api: for clients that look for models, chat, complete and embed as at Ollama.

    request → protocol (fields) → conversation of /v1/chat/completions → its answer → output (NDJSON)

Models are those that the server was started with; nothing is fetched, made or deleted. docs/serve.md says
what differs.
"""
