"""The runner for GPUs: the compiled step's families as torch operators (kernels/device/).

On a CPU the operators' torch bodies run, which are their definition. Never run on a GPU.
"""
