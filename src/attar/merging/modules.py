"""Which part of the config each stack of layers, and each tensor outside of them, is merged by.

Without ``modules`` everything is one module. With them, a module called ``encoder`` is for the tensors that
have the word ``encoder`` in their name; ``text_decoder`` and ``language_model`` are for the stack that the
config's number of layers is about; ``default`` is for what no other module is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attar.errors import RecipeError
from attar.merging.config.schema import Module
from attar.merging.member import Member
from attar.merging.planning.naming import Stack, comes_first

_MAIN = ("text_decoder", "language_model")
_REST = "default"


@dataclass(frozen=True)
class Assignment:
    """Stacks with their modules.

    Attributes:
        stacks: in the order of the modules.
    """

    stacks: tuple[tuple[Module, Stack], ...]

    def of(self, name: str) -> tuple[Module, Stack]:
        """The module of a tensor outside the stacks, and the stack that it goes with.

        A tensor that has no module's word goes with the first stack where it stands before the layers, with
        the last one otherwise.
        """
        for module, stack in self.stacks:
            if module.name is not None and _has_words(name, module.name):
                return module, stack
        main = self.stacks if self.stacks[0][0].name is not None else self.stacks[:1]
        return main[0 if comes_first(name) else -1]


def assign(modules: Sequence[Module], lead: Member) -> Assignment:
    """Find the module of every stack.

    Args:
        modules: of the config.
        lead: the model whose stacks they are.

    Raises:
        RecipeError: a module fits no stack, a stack no module, or slices are given for several stacks.
    """
    pairs = [(module, stack) for module in modules for stack in _stacks_of(module, modules, lead)]
    for stack in lead.stacks:
        owners = [module for module, each in pairs if each is stack]
        if len(owners) > 1:
            raise RecipeError(
                f"{owners[1].where}: both {owners[0].name!r} and {owners[1].name!r} fit {stack.prefix}"
            )
        if not owners:
            raise RecipeError(
                f"{modules[0].where}: no module fits the layers {stack.prefix} of {lead.label}",
                hint="add a module 'default' for the rest",
            )
    return Assignment(tuple(pairs))


def _stacks_of(module: Module, modules: Sequence[Module], lead: Member) -> list[Stack]:
    """The stacks that a module is for."""
    found = [stack for stack in lead.stacks if _fits(module, stack, modules, lead)]
    prefixes = ", ".join(stack.prefix for stack in lead.stacks)
    if not found:
        raise RecipeError(
            f"{module.where}: module {module.name!r} fits no layers of {lead.label}: {prefixes}"
        )
    sliced = any(source.layers is not None for each in module.slices for source in each.sources)
    if sliced and len(found) > 1:
        raise RecipeError(
            f"{module.where}: {lead.label} has several stacks of layers ({prefixes});"
            " whose are these slices?",
            hint="write 'modules' with a name from the stack's, such as encoder and decoder",
        )
    return found


def _fits(module: Module, stack: Stack, modules: Sequence[Module], lead: Member) -> bool:
    if module.name is None:
        return True
    if module.name == _REST:
        return not any(_fits(each, stack, modules, lead) for each in modules if each.name != _REST)
    words = _has_words(stack.prefix, module.name)
    return words or (module.name in _MAIN and stack is lead.stacks[0])


def _has_words(name: str, words: str) -> bool:
    """Whether the dotted ``words`` stand in a dotted name."""
    return f".{words}." in f".{name}."
