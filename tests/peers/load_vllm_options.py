"""Reads command lines of ``vllm serve`` with vLLM's own parser.

    python load_vllm_options.py FILES < command-lines.json

FILES are vLLM's Python files; prints a list with an object for each command line: what was read, or an error.
Its configs and its parser are its own, and other modules stand-ins (serving/http/vllm/reader.py).
"""

import contextlib
import io
import json
import sys
from pathlib import Path

from load_served_linears import reader
from pydantic_core import core_schema

OWN = ("config", "engine.arg_utils", "entrypoints.common.cli_args", "entrypoints.launchers.utils.constants")
OWN += (
    "entrypoints.anthropic.protocol",
    "entrypoints.openai.models.protocol",
    "tool_parsers.tool_strict_level",
)
OWN += ("utils.argparse_utils", "utils.import_utils", "utils.math_utils", "utils.mem_constants", "exceptions")
OWN += (
    "utils.torch_utils",
    "utils.mem_utils",
    "sampling_params",
    "pooling_params",
    "envs",
    "tasks",
    "logger",
)
OWN += (
    "v1.attention.backends.registry",
    "transformers_utils.config_parser_base",
    "ir",
    "lora",
    "scalar_type",
)
OWN += ("model_executor.layers.quantization.utils.quant_utils", "version", "_version")


def read(parser, words):
    """What the parser makes of a command line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return {name: value for name, value in vars(parser.parse_args(words)).items() if is_plain(value)}
    except SystemExit:
        return {"error": said.getvalue().strip().splitlines()[-1]}


def is_plain(value):
    """Whether it is JSON."""
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


if __name__ == "__main__":
    reader.MODULES["vllm"]["own"] = tuple(f"vllm.{name}" for name in OWN)
    reader.Nothing.__get_pydantic_core_schema__ = classmethod(lambda cls, *_: core_schema.any_schema())
    reader.STANDINS["current_platform"].device_type = "cuda"
    reader.use(Path(sys.argv[1]), "vllm")
    from vllm.config.speculative import SpeculativeConfig
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert SpeculativeConfig is not reader.ANY
    lines = json.load(sys.stdin)
    print(json.dumps([read(make_arg_parser(FlexibleArgumentParser()), words) for words in lines]))
