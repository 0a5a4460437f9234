"""Packing tiny models for tests: settings by name, rounding to nearest, static scales from one batch."""

import torch

from attar.checkpoint import open_checkpoint
from attar.checkpoint.companions import copy_companions
from attar.models.fake_quant import on_keys_and_values
from attar.models.loading.load import load_model
from attar.options import option_fields
from attar.quantization.calibration import ActivationRange
from attar.quantization.methods.rtn import rtn
from attar.quantization.plan import plan, static_inputs
from attar.quantization.settings import QuantizeSettings, StorageSettings, quantize_settings
from attar.quantization.write import write
from tests import tiny_models


def settings(**changes):
    return StorageSettings(**{"group_size": 32, **changes})


def settings_for(method="gptq", **options):
    """Settings of a method from options of which it may not take all."""
    own = {option.field.name: option for option in option_fields(QuantizeSettings)}
    fitting = {name: options[name] for name in options if not own[name].by or method in own[name].variants}
    return quantize_settings(method=method, **fitting)


def save(folder, family="llama3", dtype=torch.bfloat16, **changes):
    """A tiny model whose layers fit every scheme: 128 inputs, 256 neurons."""
    sizes = {"n_embd": 128} if family == "gpt2" else {"hidden_size": 128, "intermediate_size": 256}
    return tiny_models.save(tiny_models.build(family, **{**sizes, **changes}), folder, dtype=dtype)


def nearest(checkpoint, chosen):
    """``codes`` for :func:`write`: round to nearest."""

    def codes(stored, load):
        site = chosen.sites[stored]
        return rtn(load().T.contiguous() if site.transposed else load(), site.grid)

    return codes


@torch.no_grad()
def static_scales(checkpoint, chosen):
    """Input scales and KV scales of a plan, from one batch through the dense model."""
    model = load_model(checkpoint)
    inputs = {
        name: ActivationRange(rule) for name, rule in static_inputs(list(chosen.sites.values())).items()
    }
    for name, seen in inputs.items():
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, seen=seen: seen.add(args[0]))
    caches = {}
    for name in chosen.caches.values():
        caches[name] = pair = (ActivationRange(chosen.kv_cache), ActivationRange(chosen.kv_cache))

        def see(keys, values, pair=pair):
            pair[0].add(keys)
            pair[1].add(values)
            return keys, values

        on_keys_and_values(model.get_submodule(name), see)
    model(input_ids=tiny_models.tokens(model))
    scales = {name: (keys.scale(), values.scale()) for name, (keys, values) in caches.items()}
    return {name: seen.scale() for name, seen in inputs.items()}, scales


def pack(folder, out, *, assigned=None, codes=None, **changes):
    """Quantize a folder to another; returns the plan and the packed checkpoint."""
    checkpoint = open_checkpoint(folder)
    chosen = plan(checkpoint, settings(**changes), assigned)
    inputs, caches = static_scales(checkpoint, chosen)
    out.mkdir()
    write(
        checkpoint,
        chosen,
        codes or nearest(checkpoint, chosen),
        out,
        out.with_name(out.name + ".work"),
        input_scales=inputs,
        kv_scales=caches,
    )
    copy_companions(folder, out)
    return chosen, open_checkpoint(out)
