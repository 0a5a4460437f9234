"""llama.cpp's own endpoints, for clients of its server: /completion, /infill, /props, /slots.

Errors are OpenAI's, which llama.cpp's clients read by their message.
"""
