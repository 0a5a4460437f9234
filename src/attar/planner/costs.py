"""What a choice of schemes costs: bytes of its weight files to the byte, of its KV cache, seconds of a step.

Bytes are those of the tensors that ``attar quantize`` will write (``quantization/write.tensor_specs``) in the
shards of its writer, headers included: each scheme is planned once for all layers, and a choice takes
each layer from the plan of its scheme. A step of decoding takes the products' times (runtime/kernel_times.py)
and what was measured beside them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from attar.checkpoint.shards import TensorSpec, shard_bytes
from attar.checkpoint.tensors import tensor_bytes
from attar.models.anatomy.discover import discover
from attar.models.loading.empty import empty_model
from attar.models.loading.single_experts import single_experts
from attar.planner.settings import SCHEMES_OF
from attar.quantization.plan import QuantizationPlan, group_size, plan
from attar.quantization.settings import StorageSettings
from attar.quantization.write import tensor_specs
from attar.runtime.kernel_times import KernelShape, KernelTimes
from attar.runtime.kv.memory import LayerShape, cache_bytes
from attar.sensitivity.weight_changes import shared_groups
from attar.walks.stream import SHARD_BYTES

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

EMBEDDING = "embedding"
"""The group of the stored embedding; its options are ``dense`` and ``int8``."""

HEAD = "head"
"""The product of a head of its own, which stays dense."""

GroupChoice = Mapping[str, str]
"""Option by group."""

KV_OF_AUTO = "float16"
"""The format of keys and values of ``kv_dtype: auto`` in the compiled step; two bytes elsewhere as well."""


@dataclass(frozen=True)
class WeightCosts:
    """Bytes of every option of every group of a model's weights.

    Attributes:
        checkpoint: dense, experts one by one.
        groups: modules by group; :data:`EMBEDDING` is none of them.
        plans: of all layers in one scheme, by scheme.
        coded_embedding: the plan of the first scheme with an int8 embedding; None: not offered.
        group_size: of every scheme; 0: a whole row.
    """

    checkpoint: Any
    groups: Mapping[str, Sequence[str]]
    plans: Mapping[str, QuantizationPlan]
    coded_embedding: QuantizationPlan | None
    group_size: int

    def file_bytes(self, choice: GroupChoice) -> int:
        """Bytes of the weight files, headers included."""
        return shard_bytes(self.specs(choice), SHARD_BYTES)

    def specs(self, choice: GroupChoice) -> list[TensorSpec]:
        """The tensors of a choice in the order of the files."""
        schemes = schemes_of(self.groups, choice)
        main, any_plan = self.plans[main_scheme(schemes)], next(iter(self.plans.values()))
        modules = {stored: site.module for stored, site in any_plan.sites.items()}
        coded = self.coded_embedding if choice.get(EMBEDDING) == "int8" else None
        specs: list[TensorSpec] = []
        for info in (*self.checkpoint.tensors.values(), *self.checkpoint.mtp.values()):
            chosen = self.plans[schemes[modules[info.name]]] if info.name in modules else main
            embeds = coded is not None and info.name == coded.embedding
            specs += tensor_specs(coded if embeds and coded is not None else chosen, info)
        return specs

    @property
    def table(self) -> dict[str, dict[str, int]]:
        """Bytes of each group's tensors by option, without headers."""
        options = {
            group: {name: self.group_bytes(group, name) for name in self.plans} for group in self.groups
        }
        if self.coded_embedding is not None:
            options[EMBEDDING] = {name: self.group_bytes(EMBEDDING, name) for name in ("dense", "int8")}
        return options

    @property
    def uniform(self) -> dict[str, dict[str, str]]:
        """Choices of one scheme for all layers, the embedding as it is."""
        dense = {EMBEDDING: "dense"} if self.coded_embedding is not None else {}
        return {name: {**dict.fromkeys(self.groups, name), **dense} for name in self.plans}

    def stage(self, choice: GroupChoice, method: str) -> dict[str, Any]:
        """The stage of a recipe that makes a choice."""
        schemes = schemes_of(self.groups, choice)
        main = main_scheme(schemes)
        stage = {"stage": "quantize", "scheme": main, "group_size": self.group_size, "method": method}
        searched = {"scales": "mse"} if method == "rtn" else {}  # as losses are measured
        coded = {"embedding_bits": 8} if choice.get(EMBEDDING) == "int8" else {}
        others = {module: scheme for module, scheme in schemes.items() if scheme != main}
        patterns = [f"re:{pattern}={scheme}" for pattern, scheme in patterns_of(others)]
        return {**stage, **searched, **coded, **({"overrides": patterns} if patterns else {})}

    def group_bytes(self, group: str, option: str) -> int:
        """Bytes of a group's tensors, without headers."""
        if group == EMBEDDING:
            planned = next(iter(self.plans.values()))
            infos = [self.checkpoint.tensors[planned.table]]
            source = self.coded_embedding if option == "int8" else planned
            assert source is not None, "an int8 embedding was not offered"
        else:
            source = self.plans[option]
            members = frozenset(self.groups[group])
            infos = [
                self.checkpoint.tensors[name] for name, site in source.sites.items() if site.module in members
            ]
        specs = [spec for info in infos for spec in tensor_specs(source, info)]
        return sum(tensor_bytes(spec.dtype, spec.shape) for spec in specs)


def layer_groups(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """The Linears that will be quantized; those that engines run as one are one group. Reads headers only.

    Raises:
        ModelError: nothing in the checkpoint can be quantized.
    """
    anatomy = discover(empty_model(checkpoint.config, unstacked=True))
    sites = plan(checkpoint, StorageSettings()).sites
    return shared_groups(anatomy.blocks, [site.module for site in sites.values()])


def weight_costs(
    checkpoint: Checkpoint, groups: Mapping[str, Sequence[str]], schemes: Sequence[str], embedding: bool
) -> WeightCosts:
    """Plan each scheme once. Reads headers only.

    Args:
        groups: modules by group; together all Linears of the blocks.
        embedding: offer an int8 embedding.

    Raises:
        ModelError: nothing in the checkpoint can be quantized.
        SettingsError: a scheme does not fit.
    """
    first = plan(checkpoint, StorageSettings(scheme=schemes[0]))
    size = group_size({site.module: site.shape for site in first.sites.values()}, -1)
    plans = {name: plan(checkpoint, StorageSettings(scheme=name, group_size=size)) for name in schemes}
    coded = None
    if embedding:
        coded = plan(checkpoint, StorageSettings(scheme=schemes[0], group_size=size, embedding_bits=8))
    return WeightCosts(single_experts(checkpoint), groups, plans, coded, size)


def schemes_of(groups: Mapping[str, Sequence[str]], choice: GroupChoice) -> dict[str, str]:
    """The scheme of each module."""
    return {module: choice[group] for group, modules in groups.items() for module in modules}


def main_scheme(schemes: Mapping[str, str]) -> str:
    """The scheme of most modules, a recipe's ``scheme``; of several the first by name."""
    counts = Counter(schemes.values())
    return min(counts, key=lambda name: (-counts[name], name))


def patterns_of(options: Mapping[str, str]) -> list[tuple[str, str]]:
    """Regular expressions with the option of the names that each matches; together each name once.

    Names are taken together that differ in one number alone, the layer's.
    """
    together: dict[tuple[str, str, str], list[str]] = {}
    for name, option in options.items():
        number = re.search(r"(?<=\.)\d+(?=\.)", name)
        parts = (name[: number.start()], name[number.end() :]) if number else (name, "")
        together.setdefault((option, *parts), []).append(number[0] if number else "")
    patterns = []
    for (option, before, after), numbers in together.items():
        middle = f"({'|'.join(numbers)})" if numbers != [""] else ""
        patterns.append((f"^{re.escape(before)}{middle}{re.escape(after)}$", option))
    return patterns


def kv_bytes(layers: Sequence[LayerShape], kv_dtype: str, context: int, batch: int) -> int:
    """Bytes of the KV cache of ``batch`` sequences of ``context`` tokens; 0 for a context of 0."""
    if not context:
        return 0
    return cache_bytes(layers, KV_OF_AUTO if kv_dtype == "auto" else kv_dtype, context, batch, 32)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step of decoding, by the products' formats.

    Attributes:
        groups: of the products of each group by option; of :data:`EMBEDDING` of the head that is it, of
            :data:`HEAD` of one of its own, ``dense``.
        overhead: outside its products.
    """

    groups: Mapping[str, Mapping[str, float]]
    overhead: float = 0.0

    def fastest(self, options: Mapping[str, Iterable[str]]) -> float:
        """Of a step whose groups are each in their fastest option."""
        best = {
            group: min(options[group], key=self.groups[group].__getitem__)
            for group in self.groups.keys() & options.keys()
        }
        return self.seconds(best)

    def seconds(self, choice: GroupChoice) -> float:
        """Of a step."""
        groups = (seconds[choice.get(group, "dense")] for group, seconds in self.groups.items())
        return self.overhead + math.fsum(groups)


def group_seconds(
    table: KernelTimes, products: Mapping[str, Sequence[GroupProduct]], batch: int
) -> dict[str, dict[str, float]]:
    """Seconds of the products of each group in every option that the table's machine has a kernel of.

    Args:
        products: of each group.
        batch: sequences, which is T of every product.

    Raises:
        KeyError: the table lacks a product.
    """
    formats = kernel_formats(table)
    return {
        group: {
            option: math.fsum(
                product.calls(batch) * table.seconds[product.shape(kind, batch)] for product in members
            )
            for option, kind in formats.items()
        }
        for group, members in products.items()
    }


class GroupProduct(NamedTuple):
    """A product of a step: one of all tokens, or of each expert that some of them chose.

    T tokens choose k of E experts, taken as if by chance: calls = E (1 - (1 - k/E)^T) experts are read, each
    for about k T / calls tokens.

    Attributes:
        rows, columns: N and K.
        experts, active: E and k; 0 experts: all tokens go through it.
    """

    rows: int
    columns: int
    experts: int = 0
    active: int = 0

    def calls(self, batch: int) -> float:
        """Products of a step of ``batch`` tokens."""
        return self.experts * (1 - (1 - self.active / self.experts) ** batch) if self.experts else 1.0

    def shape(self, kind: str, batch: int) -> KernelShape:
        """One of them, its weight in a format."""
        tokens = max(round(self.active * batch / self.calls(batch)), 1) if self.experts else batch
        return KernelShape(kind, self.rows, self.columns, tokens)


WIDTHS = {scheme: int(scheme[1]) for scheme in SCHEMES_OF["attar"]}
STEP_FORMATS = {
    "dense": "bf16",
    "int8": "int8",
    **{scheme: "int4" if bits <= 4 else "int8" for scheme, bits in WIDTHS.items()},
}
"""The format in which the compiled step multiplies an option's weights (runtime/runner/codes.py)."""

CARD_FORMATS = {
    "dense": "bfloat16 by triton",
    "int8": "int8 by triton",
    **{scheme: f"int{bits} by triton" for scheme, bits in WIDTHS.items()},
}
"""In which the device runner does (runtime/runner/device/product_times.py)."""


def kernel_formats(table: KernelTimes) -> dict[str, str]:
    """The format of each option's weights on the machine of a table, which may be a card."""
    of_card = any(" by " in shape.format for shape in table.seconds)
    return CARD_FORMATS if of_card else STEP_FORMATS


def kernel_shapes(
    products: Iterable[GroupProduct], batch: int, formats: Mapping[str, str] = STEP_FORMATS
) -> list[KernelShape]:
    """Every product that a plan may have."""
    kinds = dict.fromkeys(formats.values())
    return list(dict.fromkeys(product.shape(kind, batch) for product in products for kind in kinds))
