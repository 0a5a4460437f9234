"""A device that is none: its tensors are on the CPU, and torch takes them for a GPU's.

    with pretended() as device:
        attar.quantize(model, out, device=NAME)
    device.reads         where the host waited for the device

What a GPU would refuse is an error (an operation on tensors of both), and what would make the host wait is
recorded with its line: values that are read, copies to the CPU, shapes that depend on values. Everything else
computes as ever, so verbs run to their end, and what they write can be compared.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import accelerate
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

NAME = torch.device("meta", 1)  # of the one type without a backend for which torch has gradients
SOURCE = Path(__file__).parents[1] / "src" / "attar"
WAITS = (
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique_dim", "_unique2",
    "unique_consecutive", "bincount", "item", "repeat_interleave", "histc",
)  # fmt: skip
CURRENT = []
HELD = WeakTensorKeyDictionary()
FROM_LISTS = (torch.tensor, torch.as_tensor, torch.asarray)
INDEXED = ("index", "index_put_", "_index_put_impl_")  # indices may be on the CPU
COPIES = ("copy_", "_to_copy", "_pin_memory")


class HostGenerator(torch.Generator):
    """The CPU's, for the device too."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu" if torch.device(device) == NAME else device)


class MixedDevicesError(AssertionError):
    """An operation has tensors of the device and of the CPU."""


class DeviceTensor(torch.Tensor):
    """A tensor of the device; its values are in ``held``, on the CPU."""

    @staticmethod
    def __new__(cls, held, requires_grad=False, **attributes):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device=NAME, requires_grad=requires_grad,
        )  # fmt: skip

    def __init__(self, held, requires_grad=False, **attributes):
        HELD[self] = held.held if isinstance(held, DeviceTensor) else held
        self.__dict__.update(attributes)  # of a parameter

    is_meta = False

    @property
    def held(self):
        return HELD[self]

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        return run(function, arguments, keywords or {}, None)

    def tolist(self):
        CURRENT[-1].reads[where()] += 1
        return self.held.tolist()

    def __repr__(self):
        return f"{NAME}: {self.held!r}"


class Device(TorchDispatchMode):
    """Runs operations of the device on the CPU.

    Attributes:
        reads: lines of attar at which the host waited, with how often.
    """

    def __init__(self):
        super().__init__()
        self.reads = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        return run(function, arguments, keywords or {}, self)


class Lists(TorchFunctionMode):
    """Tensors of lists: torch makes them on the CPU, and on meta without their values."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        device = keywords.get("device")
        if function in FROM_LISTS and device is not None and torch.device(device) == NAME:
            others = {name: value for name, value in keywords.items() if name != "device"}
            return function(*arguments, **others).to(device)
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            tensor, index, *value = arguments
            return function(tensor, without_lists(index), *value)
        if function is torch.Tensor.new_tensor and isinstance(arguments[0], DeviceTensor):
            like, values = arguments
            return torch.tensor(values, **{"dtype": like.dtype, **keywords}).to(like.device)
        return function(*arguments, **keywords)


def without_lists(index):
    """An index whose lists are tensors on the CPU."""
    if isinstance(index, tuple):
        return tuple(map(without_lists, index))
    return torch.tensor(index) if isinstance(index, list) else index


def run(function, arguments, keywords, device):
    """An operation, by its arguments on the CPU. Tensors that it makes are on the device where its arguments
    are, or where it says so."""
    flat, _ = tree_flatten((arguments, keywords))
    inside = [x for x in flat if isinstance(x, DeviceTensor)]
    outside = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, DeviceTensor) and x.dim()]
    name = function.__name__.partition(".")[0]
    if inside and outside and name not in (*COPIES, *INDEXED):
        shape = tuple(outside[0].shape)
        raise MixedDevicesError(f"{function} of tensors on the device and of {shape} on the CPU")
    target = keywords.get("device")
    into_cpu = name == "copy_" and not isinstance(arguments[0], DeviceTensor)
    stays = not into_cpu and (bool(inside) if target is None else torch.device(target) == NAME)
    shaped_by_values = name == "index" and any(x.dtype in (torch.bool, torch.uint8) for x in inside[1:])
    read = name in WAITS or shaped_by_values or (not stays and torch.device(target or "cpu").type == "cpu")
    if device is not None and inside and read:
        device.reads[where()] += 1
    if target is not None and stays:
        keywords = {**keywords, "device": torch.device("cpu")}
    wrappers = {id(x.held): x for x in inside}
    plain, named = tree_map_only(DeviceTensor, lambda x: x.held, (arguments, keywords))
    result = function(*plain, **named)
    if not stays:
        return result
    return tree_map_only(
        torch.Tensor, lambda x: wrappers[id(x)] if id(x) in wrappers else DeviceTensor(x), result
    )


def where():
    """The innermost line of attar, as file:line function."""
    frame = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if SOURCE in file.parents:
            return f"{file.relative_to(SOURCE)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "outside of attar"


@contextlib.contextmanager
def pretended():
    """The device, while it is there. torch's automatic precision does not know it: products are float32."""
    autocast, enabled = torch.autocast, torch.is_autocast_enabled

    def precision(kind, *arguments, **options):
        return contextlib.nullcontext() if kind == NAME.type else autocast(kind, *arguments, **options)

    fused = "torch.optim.optimizer._get_fused_kernels_supported_devices"
    with (
        mock.patch.object(torch, "autocast", precision),
        mock.patch.object(
            torch, "is_autocast_enabled", lambda *kind: kind != (NAME.type,) and enabled(*kind)
        ),
        mock.patch.object(accelerate.Accelerator, "device", NAME),
        mock.patch(fused, lambda: ["cpu", NAME.type]),
        mock.patch.object(torch, "Generator", HostGenerator),
        Device() as device,
        Lists(),
    ):
        CURRENT.append(device)
        try:
            yield device
        finally:
            CURRENT.pop()
