"""Codes of a packed source that are taken over as they are: where a Linear's new grid is the grid that it is
stored on, there is nothing to round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from attar.formats.dense_names import fused_name
from attar.formats.readers import Decoded, quant_method
from attar.models.loading.single_experts import SingleExperts
from attar.quantization.grids import Grid, QuantizedTensor, TileParameters
from attar.quantization.layerwise import fused
from attar.quantization.methods.rtn import rtn
from attar.quantization.plan import LayerPlan, QuantizationPlan
from attar.quantization.quantization_method import RoundedModel
from attar.quantization.settings import QATSettings, QuantizeSettings


def carried(source: Any, chosen: QuantizationPlan, settings: QuantizeSettings) -> QuantizationPlan:
    """The part of a plan whose codes the source has, with scales in the type of the stored ones. Reads
    headers, and of GPTQ and AWQ the codes, whose zero points decide what grid they are on.

    Args:
        source: what is rounded; a view that decodes a packed checkpoint, or none of whose codes are taken: a
            dense checkpoint, or what a transform has made.
    """
    decoded = source.stacked if isinstance(source, SingleExperts) else source
    trained = isinstance(settings.rounding, QATSettings) or settings.amount is not None

    def kept(sites: Mapping[str, LayerPlan]) -> dict[str, LayerPlan]:
        grids = {name: source.grid(name) for name in sites}
        return {
            name: replace(site, grid=site.scheme.grid(grids[name][1]))
            for name, site in sites.items()
            if grids[name] is not None and grids[name][0] == site.scheme.weights
        }

    if trained or not isinstance(decoded, Decoded):
        return replace(chosen, sites={}, mtp={})
    return replace(chosen, sites=kept(chosen.sites), mtp=kept(chosen.mtp))


def without(chosen: QuantizationPlan, kept: QuantizationPlan) -> QuantizationPlan:
    """The rest of a plan."""
    sites = {name: site for name, site in chosen.sites.items() if name not in kept.sites}
    mtp = {name: site for name, site in chosen.mtp.items() if name not in kept.mtp}
    return replace(chosen, sites=sites, mtp=mtp)


class CarriedCodes:
    """The stored codes of a plan's Linears, and those of a rounding for all others; of a multi-token
    prediction head what the rounding leaves out is rounded to nearest.

    Args:
        kept: of :func:`carried`.
    """

    def __init__(
        self, source: Any, chosen: QuantizationPlan, kept: QuantizationPlan, rounded: RoundedModel
    ) -> None:
        self.source, self.chosen, self.kept, self.rounded = source, chosen, kept, rounded

    def __call__(self, stored: str, load: Callable[[], Tensor]) -> QuantizedTensor:
        site = self.kept.sites.get(stored) or self.kept.mtp.get(stored)
        if site is None and stored in self.rounded.mtp:
            return self.rounded.mtp[stored]
        if site is None and stored in self.chosen.mtp:
            return rtn(load(), self._head_grid(stored))
        if site is None:
            return self.rounded.codes(stored, load)
        coded = self.source.codes(stored)
        above = {} if coded.global_scale is None else {"global_scale": coded.global_scale}
        codes = coded.codes.to(site.grid.code_dtype)
        return QuantizedTensor(site.grid, codes, TileParameters(coded.scale, coded.zero, stored=above))

    def _head_grid(self, stored: str) -> Grid:
        """The grid of a Linear of the head; those that engines run as one share NVFP4's global scale."""
        siblings = [name for name in self.chosen.mtp if fused_name(name) == fused_name(stored)]
        return fused(self.chosen.mtp[stored].grid, map(self.source.load, siblings))

    def reports(self) -> list[dict[str, Any]]:
        """One row a layer, carried ones last."""
        kept = [site.module for site in self.kept.sites.values()]
        return self.rounded.reports() + [
            {"name": name, "weight_error": 0.0, "carried": True} for name in kept
        ]


def _nothing(stored: str, load: Callable[[], Tensor]) -> QuantizedTensor:
    raise AssertionError(f"{stored} is carried")


NOTHING_ROUNDED = RoundedModel(_nothing, list)
"""Where every code is carried."""


def loss_note(source: Any, chosen: QuantizationPlan, kept: QuantizationPlan) -> str | None:
    """What is lost twice, in a line; None for a dense source."""
    if not isinstance(source, Decoded):
        return None
    method, count, total = quant_method(source.checkpoint), len(kept.sites), len(chosen.sites)
    if count == total:
        return (
            f"{source.name} is quantized already ({method}): its codes are carried, nothing is rounded again"
        )
    some = f"{count} of {total} Linears keep their codes, the others' weights" if count else "its weights"
    return (
        f"{source.name} is quantized already ({method}): {some} are rounded a second time, and errors and KL "
        "are measured against it as it is stored, not against the model that it was made from"
    )
