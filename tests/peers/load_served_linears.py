"""Reads quantized folders with the own code of vLLM or SGLang: their quantization configs, which choose a
method for each Linear, and the parameters that the method makes.

    python load_served_linears.py FILES ENGINE FOLDER...

FILES are the engine's Python files, ENGINE is vllm or sglang; prints a list with an object for each folder:
the class of each Linear's method, parameters without a tensor (missing), tensors without a parameter
(unknown) and those of another shape (other).

The engine is not installed. The files of its quantization, and of its parameters, are its own; every other
module of it is a stand-in. Linears are those of a Llama, one by one: what an engine merges (q, k and v) has
the same parameters, side by side; the merged names are asked for their method too.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import nn

MODULES = {
    "vllm": {
        "own": (
            "vllm.config.quantization",
            "vllm.model_executor.layers.quantization",
            "vllm.model_executor.parameter",
            "vllm.scalar_type",
            "vllm.utils.math_utils",
        ),
        "linear": "vllm.model_executor.layers.linear",
        "configs": {
            "compressed-tensors": "compressed_tensors.compressed_tensors:CompressedTensorsConfig",
            "gptq": "auto_gptq:AutoGPTQConfig",
            "awq": "auto_awq:AutoAWQConfig",
            "modelopt": "modelopt:ModelOptFp8Config",
            "modelopt_fp4": "modelopt:ModelOptNvFp4Config",
        },
        "package": "vllm.model_executor.layers.quantization",
    },
    "sglang": {
        "own": ("sglang.srt.layers.quantization", "sglang.srt.layers.parameter"),
        "linear": "sglang.srt.layers.linear",
        "configs": {
            "compressed-tensors": "compressed_tensors.compressed_tensors:CompressedTensorsConfig",
            "gptq": "gptq.gptq:GPTQMarlinConfig",
            "awq": "awq.awq:AWQMarlinConfig",
            "modelopt": "modelopt_quant:ModelOptFp8Config",
            "modelopt_fp4": "modelopt_quant:ModelOptFp4Config",
        },
        "package": "sglang.srt.layers.quantization",
    },
}
MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
PROJECTIONS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class Nothing:
    """Stands for whatever a module has: a decorator, a base class, a function, a type. It is false, and
    neither larger nor smaller than anything."""

    __name__ = "Any"

    def __call__(self, *args, **options):
        return args[0] if len(args) == 1 and callable(args[0]) and not options else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __mro_entries__(self, bases):
        return ()

    def __instancecheck__(self, instance):
        return False

    def __getitem__(self, item):
        return self

    def __or__(self, other):
        return self

    __ror__ = __or__

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False

    def __lt__(self, other):
        return False

    __le__ = __gt__ = __ge__ = __lt__


class Capability(NamedTuple):
    """Of a GPU."""

    major: int
    minor: int

    def to_int(self):
        return 10 * self.major + self.minor


class Platform(Nothing):
    """The engine's view of a GPU with every instruction."""

    def fp8_dtype(self):
        return torch.float8_e4m3fn

    def has_device_capability(self, *version, **options):
        return True

    def get_device_capability(self, *words):
        return Capability(9, 0)

    is_cuda = has_device_capability


ANY = Nothing()


class LinearBase(nn.Module):
    """A Linear of the engine, before its method made its parameters."""

    scheme = None

    def __init__(self, prefix, inputs, sizes):
        super().__init__()
        self.prefix, self.input_size, self.output_size = prefix, inputs, sum(sizes)
        self.input_size_per_partition, self.output_size_per_partition = inputs, sum(sizes)
        self.output_partition_sizes = self.logical_widths = sizes
        self.tp_size, self.tp_rank = 1, 0


class Other(nn.Module):
    """Any other layer that a config asks about."""


class WeightsMapper:
    """Which suffixes of stored names the engine drops."""

    def __init__(self, orig_to_new_suffix=None, **other):
        self.dropped = tuple(name for name, new in (orig_to_new_suffix or {}).items() if new is None)


class UnquantizedLinearMethod:
    """For what a config leaves as it is."""

    def create_weights(self, layer, input_size_per_partition, output_partition_sizes, *sizes, **options):
        dtype = options["params_dtype"]
        weight = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=dtype)
        layer.weight = nn.Parameter(weight, requires_grad=False)


STANDINS = {
    "LinearBase": LinearBase,
    "UnquantizedLinearMethod": UnquantizedLinearMethod,
    "LinearMethodBase": object,
    **dict.fromkeys(("Attention", "RadixAttention", "FusedMoE", "ParallelLMHead"), Other),
    **dict.fromkeys(("VocabParallelEmbedding", "MLAAttention", "RoutedExperts", "FusedMoEMethodBase"), Other),
    "get_tensor_model_parallel_rank": lambda: 0,
    "get_tensor_model_parallel_world_size": lambda: 1,
    "get_device_capability": lambda *words: (9, 0),
    "current_platform": Platform(),
    "WeightsMapper": WeightsMapper,
    "config": lambda cls=None, **options: dataclass(cls) if cls is not None else dataclass,
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The engine's own files for some modules, stand-ins for its others and for its kernels."""

    def __init__(self, files, engine):
        self.files, self.engine = files, engine

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ("vllm", "sglang", "sgl_kernel", "triton", "cuda", "flashinfer"):
            return None
        file = self.files / Path(*name.split("."))
        if name.startswith(MODULES[self.engine]["own"]):
            for candidate in (file.with_suffix(".py"), file / "__init__.py"):
                if candidate.is_file():
                    places = [str(file)] if candidate.name == "__init__.py" else None
                    return importlib.util.spec_from_file_location(
                        name, candidate, submodule_search_locations=places
                    )
            if file.is_dir():
                return importlib.machinery.ModuleSpec(name, None, is_package=True)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__getattr__ = standin
        return module

    def exec_module(self, module):
        module.__path__ = []


def standin(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return STANDINS.get(name, ANY)


def config_of(engine, stored):
    """The engine's own quantization config of a config.json."""
    quantization = stored.get("quantization_config")
    kind = quantization["quant_method"]
    if kind == "modelopt" and quantization.get("quant_algo", "").startswith("NVFP4"):
        kind = "modelopt_fp4"
    module, cls = MODULES[engine]["configs"][kind].split(":")
    loaded = importlib.import_module(f"{MODULES[engine]['package']}.{module}")
    config = getattr(loaded, cls).from_config(quantization)
    config.packed_modules_mapping = MERGED
    return config


def parameters(config, prefix, sizes, inputs):
    """Name to shape of what the config's method makes for a Linear; and the method's class."""
    layer = LinearBase(prefix, inputs, sizes)
    method = config.get_quant_method(layer, prefix) or UnquantizedLinearMethod()
    options = {"params_dtype": torch.bfloat16, "weight_loader": lambda *words: None}
    method.create_weights(layer, inputs, sizes, inputs, sum(sizes), **options)
    scheme = getattr(layer, "scheme", None)
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    return shapes, type(scheme or getattr(method, "scheme", None) or method).__name__


def read(folder, engine):
    """What the engine makes of a folder."""
    stored = json.loads((folder / "config.json").read_text())
    config = config_of(engine, stored)
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names = [name for name in opened.keys() if not name.endswith(dropped(config))]  # noqa: SIM118
            tensors |= {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    width, inner = stored["hidden_size"], stored["intermediate_size"]
    kv = width // stored["num_attention_heads"] * stored["num_key_value_heads"]
    outputs = dict(zip(PROJECTIONS, (width, kv, kv, width, inner, inner, width), strict=True))
    report = {"methods": {}, "missing": [], "unknown": [], "other": []}
    for number in range(stored["num_hidden_layers"]):
        for name, rows in outputs.items():
            prefix = f"model.layers.{number}.{name}"
            inputs = inner if name == "mlp.down_proj" else width
            shapes, method = parameters(config, prefix, [rows], inputs)
            report["methods"][prefix] = method
            compare(report, prefix, shapes, tensors)
        for merged, parts in MERGED.items():
            owner = "self_attn" if merged == "qkv_proj" else "mlp"
            sizes = [outputs[f"{owner}.{part}"] for part in parts]
            prefix = f"model.layers.{number}.{owner}.{merged}"
            report["methods"][prefix] = parameters(config, prefix, sizes, width)[1]
    return report


def dropped(config):
    """Suffixes of tensors that the engine's own mapper does not load; none by default."""
    mapper = getattr(config, "get_checkpoint_weight_mapper", None)
    return getattr(mapper(), "dropped", ()) if mapper is not None else ()


def compare(report, prefix, shapes, tensors):
    """Note where the tensors of a Linear and its parameters differ; one number may be () or (1,)."""
    own = {name.rpartition(".")[2]: size for name, size in tensors.items() if name.startswith(f"{prefix}.")}
    for name, size in shapes.items():
        if name not in own:
            report["missing"].append(f"{prefix}.{name} {size}")
        elif tuple(filter((1).__ne__, own[name])) != tuple(filter((1).__ne__, size)):
            report["other"].append(f"{prefix}.{name} {own[name]}: of {size}")
    report["unknown"] += [f"{prefix}.{name} {size}" for name, size in own.items() if name not in shapes]


if __name__ == "__main__":
    torch.cuda.get_device_capability = lambda *device: Capability(9, 0)  # where there is no GPU
    sys.meta_path.insert(0, Finder(Path(sys.argv[1]), sys.argv[2]))
    print(json.dumps([read(Path(folder), sys.argv[2]) for folder in sys.argv[3:]]))
