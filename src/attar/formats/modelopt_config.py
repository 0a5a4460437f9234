"""What NVIDIA ModelOpt's checkpoints say of themselves: ``quantization_config`` in config.json, and
hf_quant_config.json in older words.

NVIDIA Model Optimizer, ``modelopt/torch/export/convert_hf_config.py`` and ``quant_utils.get_quant_config``.

Readers take a file for ModelOpt's by its producer's name, which therefore stands there whoever wrote it, and
vLLM asks an NVFP4 file for group_size, kv_cache_quant_algo and exclude_modules. Dense modules are named in
full: a reader also skips every module whose name contains one that is listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attar.errors import ModelError
from attar.formats.modelopt import ALGORITHMS
from attar.formats.rules import ActivationRule, WeightRule

FILE = "hf_quant_config.json"
PRODUCER = {"name": "modelopt", "version": "0.39.0"}
MIXED = "MIXED_PRECISION"
MIXABLE = ("FP8", "NVFP4", "W4A16_NVFP4")
"""What vLLM reads side by side in one checkpoint."""


def quantization_config(
    layers: Mapping[str, str], ignore: Sequence[str], *, kv_cache: bool = False
) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    Args:
        layers: the algorithm of each quantized module.
        ignore: modules that keep their dense weight; ``*`` stands for anything.
        kv_cache: keys and values are FP8.

    Raises:
        ModelError: engines do not read these algorithms side by side.
    """
    said = _layers(layers)
    groups = {
        f"group_{number}": {**_group(name), "targets": targets if len(said) > 1 else ["Linear"]}
        for number, (name, targets) in enumerate(said.items())
    }
    made: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": MIXED if len(said) > 1 else next(iter(said)),
        "config_groups": groups,
        "ignore": list(ignore),
        "producer": PRODUCER,
    }
    if len(said) > 1:
        made["quantized_layers"] = {name: _entry(layers[name]) for name in layers}
    if kv_cache:
        made["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return made


def hf_quant_config(
    layers: Mapping[str, str], ignore: Sequence[str], *, kv_cache: bool = False
) -> dict[str, Any]:
    """The content of hf_quant_config.json, which says the same."""
    said = _layers(layers)
    inner: dict[str, Any] = {"quant_algo": MIXED, "quantized_layers": {}}
    if len(said) == 1:
        inner = _entry(next(iter(said)))
    else:
        inner["quantized_layers"] = {name: _entry(layers[name]) for name in layers}
    inner |= {"kv_cache_quant_algo": "FP8" if kv_cache else None, "exclude_modules": list(ignore)}
    return {"producer": PRODUCER, "quantization": inner}


def _layers(layers: Mapping[str, str]) -> dict[str, list[str]]:
    """Modules by algorithm."""
    assert layers, "a checkpoint of ModelOpt's has a quantized layer"
    names = dict.fromkeys(layers.values())
    other = next((name for name in names if name not in MIXABLE), None)
    if len(names) > 1 and other:
        raise ModelError(
            f"engines read ModelOpt's {other} in a checkpoint of its own, not beside {', '.join(names)}",
            hint="one scheme for all layers",
        )
    return {name: [module for module, chosen in layers.items() if chosen == name] for name in names}


def _entry(name: str) -> dict[str, Any]:
    """What stands for a layer in ``quantized_layers``."""
    size = ALGORITHMS[name][0].group_size
    return {"quant_algo": name, "group_size": size} if size else {"quant_algo": name}


def _group(name: str) -> dict[str, Any]:
    """A config group, in ModelOpt's words: a strategy is said only where it is not one of a tensor."""
    weights, activations = ALGORITHMS[name]

    def words(rule: WeightRule | ActivationRule) -> dict[str, Any]:
        said: dict[str, Any] = {"dynamic": False, "num_bits": rule.bits, "type": "float"}
        if rule.group_size:
            said["group_size"] = rule.group_size
        return {**said, "strategy": rule.strategy} if rule.strategy in ("channel", "block") else said

    return {
        "weights": words(weights),
        **({"input_activations": words(activations)} if activations else {}),
    }
