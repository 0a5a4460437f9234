"""``attar serve --engine vllm``: vLLM's server runs the model, behind attar's page, keys and limits.

    loads.py      whether vLLM loads the folder, by vLLM's own code (reader.py), before it is started
    flags.py      attar's settings as vLLM's options; those that vLLM does not have are refused
    process.py    vLLM's server as a child process on a unix socket that nobody else may open
    forward.py    /v1/* passes through, counted and bounded; everything else is answered as ever

Never run on a GPU, and not with vLLM: its options were read by its own parser, its files by its own code.
"""
