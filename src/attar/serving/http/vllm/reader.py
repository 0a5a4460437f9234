"""What the own code of vLLM makes of a quantized folder: its quantization config chooses a method for each
Linear, and the method makes the parameters that the folder's tensors have to fill.

    python reader.py FILES vllm FOLDER < linears.json

FILES is the folder of vLLM's Python files, installed or taken out of a wheel; linears.json has outputs and
inputs of each Linear by name. Prints an object: the class of each Linear's method, parameters without a
tensor (missing), tensors without a parameter (unknown), those of another shape (other), and what vLLM says
against the folder (refused).

Nothing of vLLM runs, and no GPU is asked: the files of its quantization, and of its parameters, are its own;
every other module of it is a stand-in. What vLLM merges (q, k and v) has the same parameters, side by side;
the merged names are asked for their method too.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn

MODULES: dict[str, dict[str, Any]] = {
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
}
"""Of an engine: modules that are its own, and its config for each layout."""
MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
STANDING_IN = ("vllm", "sglang", "sgl_kernel", "triton", "cuda", "flashinfer")
REFUSALS = (ValueError, NotImplementedError, RuntimeError, AssertionError)
ParameterShapes = Mapping[str, tuple[int, ...]]
LinearsReport = dict[str, Any]


class Nothing:
    """Stands for whatever a module has: a decorator, a base class, a function, a type. It is false, and
    neither larger nor smaller than anything."""

    __name__ = "Any"

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not options else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __mro_entries__(self, bases: Any) -> tuple[()]:
        return ()

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __getitem__(self, item: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __lt__(self, other: Any) -> bool:
        return False

    __le__ = __gt__ = __ge__ = __lt__


class GpuVersion(NamedTuple):
    """Of a GPU."""

    major: int
    minor: int

    def to_int(self) -> int:
        return 10 * self.major + self.minor


class Platform(Nothing):
    """The engine's view of a GPU with every instruction."""

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def has_device_capability(self, *version: Any, **options: Any) -> bool:
        return True

    def get_device_capability(self, *words: Any) -> GpuVersion:
        return GpuVersion(9, 0)

    is_cuda = has_device_capability


ANY = Nothing()


class LinearBase(nn.Module):  # type: ignore[misc]
    """A Linear of the engine, before its method made its parameters."""

    scheme = None

    def __init__(self, prefix: str, inputs: int, sizes: list[int]) -> None:
        super().__init__()
        self.prefix, self.input_size, self.output_size = prefix, inputs, sum(sizes)
        self.input_size_per_partition, self.output_size_per_partition = inputs, sum(sizes)
        self.output_partition_sizes = self.logical_widths = sizes
        self.tp_size, self.tp_rank = 1, 0


class Other(nn.Module):  # type: ignore[misc]
    """Any other layer that a config asks about."""


class WeightsMapper:
    """Which suffixes of stored names the engine drops."""

    def __init__(self, orig_to_new_suffix: Mapping[str, str | None] | None = None, **other: Any) -> None:
        self.dropped = tuple(name for name, new in (orig_to_new_suffix or {}).items() if new is None)


class UnquantizedLinearMethod:
    """For what a config leaves as it is."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *_: int,
        **options: Any,
    ) -> None:
        dtype = options["params_dtype"]
        weight = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=dtype)
        layer.weight = nn.Parameter(weight, requires_grad=False)


STANDINS: dict[str, Any] = {
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

    def __init__(self, files: Path, engine: str) -> None:
        self.files, self.engine = files, engine

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in STANDING_IN:
            return None
        file = self.files / Path(*name.split("."))
        if name.startswith(MODULES[self.engine]["own"]):
            for candidate in (file.with_suffix(".py"), file / "__init__.py"):
                if candidate.is_file():
                    folders = [str(file)] if candidate.name == "__init__.py" else None
                    return importlib.util.spec_from_file_location(
                        name, candidate, submodule_search_locations=folders
                    )
            if file.is_dir():
                return importlib.machinery.ModuleSpec(name, None, is_package=True)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = standin  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def standin(name: str) -> Any:
    """What a module that stands in has of a name."""
    if name.startswith("__"):
        raise AttributeError(name)
    return STANDINS.get(name, ANY)


def use(files: Path, engine: str) -> None:
    """From now on the engine's modules are found: its own, and stand-ins."""
    torch.cuda.get_device_capability = lambda *device: GpuVersion(9, 0)  # type: ignore[assignment]  # no GPU
    sys.meta_path.insert(0, Finder(files, engine))


def config_of(engine: str, stored: Mapping[str, Any]) -> Any:
    """The engine's own quantization config of a config.json."""
    quantization = stored["quantization_config"]
    kind = quantization["quant_method"]
    if kind == "modelopt" and quantization.get("quant_algo", "").startswith("NVFP4"):
        kind = "modelopt_fp4"
    module, cls = MODULES[engine]["configs"][kind].split(":")
    loaded = importlib.import_module(f"{MODULES[engine]['package']}.{module}")
    config = getattr(loaded, cls).from_config(quantization)
    config.packed_modules_mapping = MERGED
    return config


def parameters(config: Any, prefix: str, sizes: list[int], inputs: int) -> tuple[ParameterShapes, str]:
    """Name to shape of what the config's method makes for a Linear; and the method's class."""
    layer = LinearBase(prefix, inputs, sizes)
    method = config.get_quant_method(layer, prefix) or UnquantizedLinearMethod()
    options = {"params_dtype": torch.bfloat16, "weight_loader": lambda *words: None}
    method.create_weights(layer, inputs, sizes, inputs, sum(sizes), **options)
    scheme = getattr(layer, "scheme", None)
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    return shapes, type(scheme or getattr(method, "scheme", None) or method).__name__


def read(folder: Path, engine: str, linears: Mapping[str, Sequence[int]]) -> LinearsReport:
    """What the engine makes of a folder whose Linears have these outputs and inputs."""
    report: LinearsReport = {"methods": {}, "missing": [], "unknown": [], "other": [], "refused": ""}
    name = ""
    try:
        config = config_of(engine, json.loads((folder / "config.json").read_text()))
        tensors = stored_shapes(folder, config)
        for name, (outputs, inputs) in linears.items():
            shapes, report["methods"][name] = parameters(config, name, [outputs], inputs)
            compare(report, name, shapes, tensors)
        for name, sizes, inputs in merged(linears):
            report["methods"][name] = parameters(config, name, sizes, inputs)[1]
    except REFUSALS as error:
        report["refused"] = f"{name}: {error}".removeprefix(": ")
    return report


def merged(linears: Mapping[str, Sequence[int]]) -> list[tuple[str, list[int], int]]:
    """Name, outputs of the parts, and inputs of what the engine joins."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in linears)
    parts = [
        (owner, name, [f"{owner}.{part}" for part in MERGED[name]]) for owner in owners for name in MERGED
    ]
    return [
        (f"{owner}.{name}", [linears[part][0] for part in joined], linears[joined[0]][1])
        for owner, name, joined in parts
        if all(part in linears for part in joined)
    ]


def stored_shapes(folder: Path, config: Any) -> ParameterShapes:
    """Of the tensors that the engine reads, by name."""
    mapper = getattr(config, "get_checkpoint_weight_mapper", None)  # says what is not loaded
    dropped = getattr(mapper(), "dropped", ()) if mapper is not None else ()
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = [name for name in opened.keys() if not name.endswith(dropped)]  # noqa: SIM118
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    return shapes


def compare(report: LinearsReport, prefix: str, shapes: ParameterShapes, tensors: ParameterShapes) -> None:
    """Note where the tensors of a Linear and its parameters differ; one number may be () or (1,)."""
    stored = {
        name.rpartition(".")[2]: size for name, size in tensors.items() if name.startswith(f"{prefix}.")
    }
    for name, size in shapes.items():
        if name not in stored:
            report["missing"].append(f"{prefix}.{name} {size}")
        elif tuple(filter((1).__ne__, stored[name])) != tuple(filter((1).__ne__, size)):
            report["other"].append(f"{prefix}.{name} {stored[name]}: of {size}")
    report["unknown"] += [f"{prefix}.{name} {size}" for name, size in stored.items() if name not in shapes]


if __name__ == "__main__":
    use(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps(read(Path(sys.argv[3]), sys.argv[2], json.load(sys.stdin))))
