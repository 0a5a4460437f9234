"""Who can load what a plan makes: said before the work, and kept in the card."""

from __future__ import annotations

from attar.formats.limits import kernels
from attar.formats.rules import PACK
from attar.quantization.plan import QuantizationPlan

YES = "yes"
UNTRIED = "nothing known against it; attar is not tested with vLLM"
CONV1D = (
    "no: the packed layout of Conv1D modules is attar's own; attar export --format dense loads everywhere"
)
ORDERED = "no: compressed-tensors dropped groups in act-order with version 0.20; attar export --format gptq"
READS = (
    "no: the family's code reads weights that stay packed; one scheme for all Linears and no kv_cache load"
)


def loads_in(chosen: QuantizationPlan) -> dict[str, str]:
    """For transformers and vLLM: "yes", or a sentence that says what is in the way. attar loads everything
    that it writes."""
    rules = {site.module: site.scheme.weights for site in chosen.sites.values()}
    if any(rule.kind == "nf4" for rule in rules.values()):
        return {
            "transformers": "yes, with bitsandbytes",
            "vllm": "with bitsandbytes, which it does not split over devices",
        }
    if any(site.transposed for site in chosen.sites.values()):
        return {"transformers": CONV1D, "vllm": CONV1D}
    if any(rule.ordered for rule in rules.values()):
        return {"transformers": ORDERED, "vllm": ORDERED}
    packed = any(site.scheme.form == PACK for site in chosen.sites.values())
    stuck = chosen.reads_weights and packed and not chosen.config.get("dequantize")
    dense = {site.module: site.shape for site in chosen.sites.values() if not site.scheme.activations}
    missing = kernels("compressed-tensors", dense, {name: rules[name] for name in dense})
    return {"transformers": READS if stuck else YES, "vllm": missing or UNTRIED}


def warnings(loads: dict[str, str]) -> list[str]:
    """What a person should hear before the work: a sentence for each library that may not load it."""
    return [f"{library}: {why}" for library, why in loads.items() if why not in (YES, UNTRIED)]
