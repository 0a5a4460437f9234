"""Which stored tensors are merged into which tensor of the result: renumbered layers, tied heads, other
names.

Layers are renumbered in the order of the slices. Tensors before the layers are merged as in the first slice,
tensors after them as in the last one, both at depth 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from attar.errors import ModelError
from attar.merging.config.schema import MergeConfig, MergeModule, MergeSource, ModelReference
from attar.merging.methods.method import MergeMethod
from attar.merging.planning.model import MergeModel
from attar.merging.planning.naming import ModelStack, comes_first, is_buffer, kind_of, layer_name
from attar.merging.planning.parameters import layer_depth
from attar.merging.planning.slices import SliceLayers, SliceResolver, has_words, stacks_by_module


@dataclass(frozen=True)
class SourceTensor:
    """A stored tensor of one model, and the source whose settings apply to it."""

    model: MergeModel
    name: str
    source: MergeSource


@dataclass(frozen=True)
class MappedTensor:
    """One tensor of the result.

    Attributes:
        module, part: their settings apply.
        tensors: of the models in :meth:`SliceLayers.all`, in that order.
        layer: its layer's number in the result; None outside the stacks.
        stack: prefix of its stack.
        depth: where gradients are evaluated, from 0 to 1.
    """

    name: str
    module: MergeModule
    part: SliceLayers
    tensors: tuple[SourceTensor, ...]
    layer: int | None = None
    stack: str = ""
    depth: float = 0.0

    @property
    def kind(self) -> str:
        """``"layer"``, ``"embedding"``, ``"head"`` or ``"other"``."""
        return kind_of(self.name, self.layer is not None)

    @property
    def sources(self) -> tuple[SourceTensor, ...]:
        """What is merged."""
        return self.tensors[: len(self.part.sources)]

    @property
    def base(self) -> SourceTensor | None:
        """The base model's tensor."""
        return self.tensors[-1] if self.part.base else None


class TensorMap:
    """The tensors of a merge.

    Attributes:
        lead: the first model; the result has its names.
        tensors: every tensor of the result: embeddings, layers in order, the rest; by name inside each.
        slices: the resolved slices by their stack's prefix.
        notes: tensors that are left out, and layers that the configuration does not name.
    """

    def __init__(
        self, config: MergeConfig, method: MergeMethod, models: Mapping[ModelReference, MergeModel]
    ) -> None:
        self.lead = models[config.modules[0].slices[0].sources[0].model]
        resolver = SliceResolver(config, method, models, self.lead)
        self.notes = resolver.notes
        self.slices: dict[str, list[SliceLayers]] = {}
        self._stacks = stacks_by_module(config.modules, self.lead)
        tensors: dict[str, MappedTensor] = {}
        for module, stack in self._stacks:
            self.slices[stack.prefix] = [resolver.resolve(part, stack) for part in module.slices]
            tensors |= {tensor.name: tensor for tensor in self._layers(module, stack)}
        tensors |= {tensor.name: tensor for tensor in self._outside()}
        self.tensors = sorted(tensors.values(), key=_order)

    def models(self) -> list[MergeModel]:
        """The models whose layers are merged, by index; a base that only gives its config is not one."""
        models = {
            layers.model.index: layers.model
            for slices in self.slices.values()
            for part in slices
            for layers in part.all()
        }
        return [models[index] for index in sorted(models)]

    def _layers(self, module: MergeModule, stack: ModelStack) -> Iterator[MappedTensor]:
        """The tensors of a stack."""
        offset = 0
        for part in self.slices[stack.prefix]:
            for index in range(part.count):
                yield from self._layer(module, stack, part, index, offset + index)
            offset += part.count

    def _layer(
        self, module: MergeModule, stack: ModelStack, part: SliceLayers, index: int, layer: int
    ) -> Iterator[MappedTensor]:
        """The tensors of layer ``index`` of a slice, ``layer`` of the result."""
        sources, depth = part.all(), layer_depth(index, part.count)
        names = {
            name
            for layers in sources
            for name in layers.model.names_in_layer(layers.stack, layers.first + index)
        }
        for local_name in sorted(names):
            tensors = tuple(
                SourceTensor(s.model, layer_name(s.stack.prefix, s.first + index, local_name), s.source)
                for s in sources
            )
            if self._complete(tensors):
                name = layer_name(stack.prefix, layer, local_name)
                yield MappedTensor(name, module, part, tensors, layer, stack.prefix, depth)

    def _complete(self, tensors: Sequence[SourceTensor]) -> bool:
        """Whether every model stores its tensor; False for a buffer that only some models store."""
        missing = [tensor for tensor in tensors if tensor.name not in tensor.model.view.tensors]
        if missing:
            owner = next(tensor for tensor in tensors if tensor not in missing)
            self._note_missing(missing[0].model, missing[0].name, owner.model, owner.name)
        return not missing

    def _note_missing(self, model: MergeModel, name: str, owner: MergeModel, owned: str) -> None:
        """Note a buffer that is left out; refuse any other tensor that a model does not have."""
        if is_buffer(owned):
            self.notes.append(
                f"{owned} is in {owner.label} and not in {model.label};"
                " it follows from the config and is left out"
            )
            return
        raise ModelError(
            f"{model.label}: no tensor {name!r}, which {owner.label} has"
            + (f" as {owned!r}" if owned != name else ""),
            hint="only models of the same layers and parts can be merged",
        )

    def _outside(self) -> Iterator[MappedTensor]:
        """The tensors outside the stacks."""
        owners: dict[str, tuple[MergeModel, str]] = {}
        for slices in self.slices.values():
            for model in (layers.model for part in slices for layers in part.all()):
                for name in model.names_outside():
                    owners.setdefault(model.name_in(self.lead, name), (model, name))
        for name in sorted(owners):
            module, stack = self._module_of(name)
            part = self.slices[stack.prefix][0 if comes_first(name) else -1]
            tensors = []
            for layers in part.all():
                stored = layers.model.stored_name(name, self.lead)
                if stored is None:
                    self._note_missing(layers.model, name, *owners[name])
                    break
                tensors.append(SourceTensor(layers.model, stored, layers.source))
            else:
                yield MappedTensor(name, module, part, tuple(tensors))

    def _module_of(self, name: str) -> tuple[MergeModule, ModelStack]:
        """The module of a tensor outside the stacks, and the stack whose slices it follows.

        A tensor without the word of a module follows the first stack if it is used before the layers, else
        the last one.
        """
        for module, stack in self._stacks:
            if module.name is not None and has_words(name, module.name):
                return module, stack
        stacks = self._stacks if self._stacks[0][0].name is not None else self._stacks[:1]
        return stacks[0 if comes_first(name) else -1]


def _order(tensor: MappedTensor) -> tuple[int, str, int, str]:
    if tensor.layer is not None:
        return 1, tensor.stack, tensor.layer, tensor.name
    return (0 if comes_first(tensor.name) else 2), "", 0, tensor.name
