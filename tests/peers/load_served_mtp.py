"""Asks the own quantization config of vLLM or SGLang for the Linears of a multi-token prediction head, by the
names that the engine's class gives them.

    python load_served_mtp.py FILES ENGINE '[[FOLDER, MERGED, [NAME, ...]], ...]'

MERGED: the engine's class of the head says which Linears are merged. Prints a list with an object for each
folder: whether each name gets a quantized method. As load_served_linears.py, whose stand-ins it takes.
"""

import json
import sys
from pathlib import Path

from load_served_linears import reader as served


def is_coded(config, name):
    """Whether the engine makes a quantized Linear of this name."""
    layer = served.LinearBase(name, 64, [64])
    method = config.get_quant_method(layer, name)
    return method is not None and not type(method).__name__.startswith("Unquantized")


def read(folder, merged, names, engine):
    """The answers for one folder."""
    config = served.config_of(engine, json.loads((Path(folder) / "config.json").read_text()))
    config.packed_modules_mapping = served.MERGED if merged else {}
    return {name: is_coded(config, name) for name in names}


if __name__ == "__main__":
    served.use(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps([read(*item, sys.argv[2]) for item in json.loads(sys.argv[3])]))
