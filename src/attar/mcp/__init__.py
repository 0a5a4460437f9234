"""``attar mcp``: attar's verbs as tools of the Model Context Protocol, for agents.

folders.py    what a client may name
tools.py      the short ones: inspect, plan, estimate, status
worker.py     quantize and evaluate in a process of their own; process.py starts it, and ends it
server.py     the tools with their types, over stdin and stdout
"""
