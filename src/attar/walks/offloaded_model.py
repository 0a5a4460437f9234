"""A model of which only what runs before the blocks is loaded, and one block at a time; hidden states
between blocks.

The blocks are on the meta device. What runs before them (embeddings, positions) is loaded for the trace
only, and of the embedding only the rows that the tokens use. The trace runs the model with every block
replaced by a recorder, so that each block's own arguments (masks, rotary tables, which differ by layer in
some families) are known without a table of families.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from attar.checkpoint.tensors import read_tensor
from attar.errors import CheckpointError, ModelError, NumericsError
from attar.models.anatomy.discover import discover
from attar.models.loading.device import bf16_products
from attar.models.loading.empty import empty_model
from attar.models.loading.single_experts import single_experts
from attar.models.loading.stored import stored_buffers, stored_names
from attar.models.surgery.masking import replaced_forward
from attar.walks.passes import StopForward


class HiddenStates:
    """Hidden states (B, S, D) by batch number: in memory up to a limit, on disk beyond it.

    Args:
        folder: for those beyond the limit.
        limit: bytes held in memory.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit, self.nbytes = folder, limit, 0
        self.batches: dict[int, Tensor | Path] = {}

    def __len__(self) -> int:
        return len(self.batches)

    def __setitem__(self, number: int, hidden: Tensor) -> None:
        hidden = hidden.detach().to("cpu")
        old = self.batches.get(number)
        if isinstance(old, Tensor):
            self.nbytes -= old.nbytes
        if self.nbytes + hidden.nbytes <= self.limit:
            self.batches[number] = hidden
            self.nbytes += hidden.nbytes
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{number}.safetensors"
        save_file({"hidden": hidden.contiguous()}, file)
        self.batches[number] = file

    def __getitem__(self, number: int) -> Tensor:
        hidden = self.batches[number]
        if isinstance(hidden, Tensor):
            return hidden
        with safe_open(hidden, framework="pt") as opened:
            read: Tensor = opened.get_tensor("hidden").clone()
        return read

    def clear(self) -> None:
        """Delete everything, on disk too."""
        for hidden in self.batches.values():
            if isinstance(hidden, Path):
                hidden.unlink(missing_ok=True)
        self.batches.clear()
        if self.folder.is_dir():
            self.folder.rmdir()


@contextmanager
def fixed_output(block: nn.Module, hidden: Tensor, extra: int | None) -> Iterator[None]:
    """The block returns ``hidden`` for any input, inside the context.

    Args:
        extra: further entries of the tuple that the block returns; None: it returns a tensor.
    """
    with replaced_forward(block, lambda *_, **__: hidden if extra is None else (hidden, *[None] * extra)):
        yield


@dataclass(frozen=True)
class BlockCall:
    """The arguments with which the model calls a block, but for the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keyword: bool  # the hidden states are a keyword argument

    def __call__(self, module: nn.Module, hidden: Tensor) -> Any:
        if self.keyword:
            return module(*self.args, hidden_states=hidden, **self.kwargs)
        return module(hidden, *self.args, **self.kwargs)


class OffloadedModel:
    """The model on the meta device, parts of which are loaded for a while."""

    def __init__(self, checkpoint: Any, device: torch.device) -> None:
        checkpoint = single_experts(checkpoint)
        self.checkpoint, self.device = checkpoint, device
        self.model = empty_model(checkpoint.config, unstacked=True)
        self.anatomy = discover(self.model)
        self.blocks = self.anatomy.blocks
        self.names = stored_names(self.model, checkpoint)
        inside = f"{self.anatomy.blocks_name}."
        stored = stored_buffers(self.model, checkpoint)
        self.buffers = {name: where for name, where in stored.items() if name.startswith(inside)}
        for name in self.buffers:
            _set_buffer(self.model, name, self.model.get_buffer(name).to("meta"))
        self.first_names = _first_names(self.model)
        self.extra: int | None = None  # further entries of the tuple that a block returns

    def trace(self, batches: Sequence[Tensor], store: HiddenStates) -> dict[tuple[int, ...], list[BlockCall]]:
        """Run what comes before the blocks: hidden states go to the store; the calls of all blocks by batch
        shape.

        Raises:
            ModelError: what runs before the blocks of this family needs more than embeddings and positions.
        """
        self._load_outer(torch.cat([batch.flatten() for batch in batches]).unique())
        try:
            self.extra = self._extra_outputs(batches[0])
        except (RuntimeError, NotImplementedError) as error:  # what runs before the blocks needs more of them
            raise self._inseparable(str(error).splitlines()[0]) from error
        if getattr(self.model.config, "num_kv_shared_layers", 0):
            raise self._inseparable("the last ones take keys and values of others")
        calls: dict[tuple[int, ...], list[BlockCall]] = {}
        for number, batch in enumerate(batches):
            recorded, hidden = self._record(batch, self.extra)
            if "input_ids" in recorded[0].kwargs:  # a call is that of all batches of its shape
                raise self._inseparable("they take the ids of the tokens")
            calls.setdefault(tuple(batch.shape), recorded)
            store[number] = hidden
        self._drop_outer()
        return calls

    def _inseparable(self, reason: str) -> ModelError:
        return ModelError(
            f"{self.anatomy.family}: its layers cannot be run one at a time: {reason}",
            hint="quantize --method rtn; prune --method magnitude, or --reconstruct none",
        )

    def advance(
        self,
        index: int,
        store: HiddenStates,
        calls: dict[tuple[int, ...], list[BlockCall]],
        *,
        fast: bool = False,
    ) -> None:
        """Run one block over all batches: its outputs replace its inputs in the store.

        Args:
            calls: of :meth:`trace`.
            fast: products are bfloat16.
        """
        block = self.blocks[index]
        with self.loaded(block), bf16_products(self.device, fast):
            for number in range(len(store)):
                hidden = store[number].to(self.device)
                output = calls[tuple(hidden.shape[:2])][index](block.module, hidden)
                store[number] = output if isinstance(output, Tensor) else output[0]

    @contextmanager
    def with_lm_head(self, used: Tensor) -> Iterator[None]:
        """Everything outside the blocks in memory (the embedding's used rows, final norm, head), for
        :meth:`logits`."""
        self._load_outer(used)
        outer = {name for name, _ in self._outer()}
        after = {name: shape for name, shape in self._after().items() if name not in outer}
        for name in after:
            value = self.checkpoint.load(self.names[self.first_names[name]])
            _set(self.model, name, value.to(self.device, torch.float32))
        try:
            yield
        finally:
            for name, shape in after.items():
                _set(self.model, name, torch.empty(shape, device="meta"))
            self._drop_outer()

    def logits(self, batch: Tensor, hidden: Tensor) -> Tensor | None:
        """Logits (B, S, V) from the hidden states (B, S, D) after the last block; None for a model without a
        head. After :meth:`trace`, inside :meth:`with_lm_head`."""
        with ExitStack() as stack:
            for block in self.blocks:
                stack.enter_context(fixed_output(block.module, hidden, self.extra))
            output = self.model(input_ids=batch.to(self.device), **self._no_cache())
        logits: Tensor | None = getattr(output, "logits", None)
        return logits

    def _after(self) -> dict[str, torch.Size]:
        """Parameters of what runs after the blocks (final norm, head), tied ones too, with their shapes."""
        owners = [name for name in (self.anatomy.final_norm, self.anatomy.head) if name]
        shapes = {}
        for owner in owners:
            for leaf, parameter in self.model.get_submodule(owner).named_parameters():
                shapes[f"{owner}.{leaf}"] = parameter.shape
        return shapes

    def _record(self, batch: Tensor, extra: int | None) -> tuple[list[BlockCall], Tensor]:
        """One pass with every block replaced by a recorder that returns its input."""
        calls: list[BlockCall] = []
        first: list[Tensor] = []

        def recorder(*args: Any, **kwargs: Any) -> Any:
            keyword = not args
            hidden = kwargs.pop("hidden_states") if keyword else args[0]
            first.append(hidden)
            calls.append(BlockCall(args[1:], kwargs, keyword))
            if len(calls) == len(self.blocks):
                raise StopForward
            return hidden if extra is None else (hidden, *[None] * extra)

        with ExitStack() as stack:
            for block in self.blocks:
                stack.enter_context(replaced_forward(block.module, recorder))
            with suppress(StopForward):
                self.model(input_ids=batch.to(self.device), **self._no_cache())
        return calls, first[0]

    def _no_cache(self) -> dict[str, bool]:
        return {"use_cache": False} if self.anatomy.causal else {}

    def _extra_outputs(self, batch: Tensor) -> int | None:
        """How many entries follow the hidden states in a block's output; None when it is a tensor. Run on the
        meta device, without a weight."""
        call, hidden = self._record_first(batch[:1])
        output = BlockCall(on_meta(call.args), on_meta(call.kwargs), call.keyword)(
            self.blocks[0].module, hidden.to("meta")
        )
        return None if isinstance(output, Tensor) else len(output) - 1

    def _record_first(self, batch: Tensor) -> tuple[BlockCall, Tensor]:
        blocks, self.blocks = self.blocks, self.blocks[:1]
        try:
            calls, hidden = self._record(batch, None)
        finally:
            self.blocks = blocks
        return calls[0], hidden

    def _load_outer(self, used: Tensor) -> None:
        """Load what runs before the blocks; of the embedding only the rows that the tokens use."""
        for name, _ in self._outer():
            module, leaf = self._owner(name)
            if name == f"{self.anatomy.embedding}.weight":
                rows = stored_rows(self.checkpoint, self.names[name], used)
                setattr(module, leaf, nn.Parameter(rows.float().to(self.device), requires_grad=False))
                self.remap = _remap(module, used.to(self.device))
            else:
                value = self.checkpoint.load(self.names[name]).to(self.device, torch.float32)
                setattr(module, leaf, nn.Parameter(value, requires_grad=False))
        for name, buffer in list(self.model.named_buffers()):
            if name not in self.buffers:
                _set_buffer(self.model, name, buffer.to(self.device))

    def _drop_outer(self) -> None:
        for name, parameter in self._outer():
            module, leaf = self._owner(name)
            setattr(
                module, leaf, nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            )
        self.remap.remove()

    def _outer(self) -> list[tuple[str, Tensor]]:
        """Parameters outside the blocks and before them: not those of final norm and head."""
        after = tuple(f"{name}." for name in (self.anatomy.final_norm, self.anatomy.head) if name)
        inside = f"{self.anatomy.blocks_name}."
        return [
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if not name.startswith(inside) and not (after and name.startswith(after)) and name in self.names
        ]

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self.model.get_submodule(path), leaf

    @contextmanager
    def loaded(self, block: Any) -> Iterator[None]:
        """The block's parameters in memory, in float32, inside the context."""
        names = [name for name, _ in block.module.named_parameters()]
        for name in names:
            full = f"{block.name}.{name}"
            value = self.checkpoint.load(self.names[full]).to(self.device, torch.float32)
            if not torch.isfinite(value).all():
                raise NumericsError(
                    f"{self.names[full]} holds NaN or infinity", hint="the checkpoint is damaged"
                )
            _set(block.module, name, value)
        buffers = {name: b for name, b in self.buffers.items() if name.startswith(f"{block.name}.")}
        for name, where in buffers.items():
            kind = self.model.get_buffer(name).dtype
            _set_buffer(self.model, name, self.checkpoint.load(where).to(self.device, kind))
        try:
            yield
        finally:
            for name in buffers:
                _set_buffer(self.model, name, self.model.get_buffer(name).to("meta"))
            for name in names:
                _set(block.module, name, torch.empty_like(block.module.get_parameter(name), device="meta"))


def _first_names(model: nn.Module) -> dict[str, str]:
    """Every parameter's name to the first name of the same parameter: tied ones have several."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def on_meta(value: Any) -> Any:
    """The same arguments with every tensor on the meta device."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, tuple | list):
        return type(value)(on_meta(item) for item in value)
    if isinstance(value, dict):
        return {name: on_meta(item) for name, item in value.items()}
    return value


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))


def _set_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, value)


def stored_rows(checkpoint: Any, name: str, used: Tensor, chunk: int = 8192) -> Tensor:
    """The used rows of a stored matrix, read in chunks so that the whole matrix is never in memory (a
    packed one is decoded as a whole).

    Args:
        used: numbers of the rows, in order.
    """
    info = checkpoint.tensors[name]
    if len(used) and int(used.max()) >= info.shape[0]:
        raise CheckpointError(f"the data has token {int(used.max())}, but {name} has {info.shape[0]} rows")
    if getattr(checkpoint, "decodes", False):
        decoded: Tensor = checkpoint.load(name)[used]
        return decoded
    row, chunks = info.nbytes // max(info.shape[0], 1), []
    for start in range(0, info.shape[0], chunk):
        inside = used[(used >= start) & (used < start + chunk)] - start
        if len(inside):
            rows = min(chunk, info.shape[0] - start)
            part = replace(
                info, shape=(rows, *info.shape[1:]), nbytes=rows * row, offset=info.offset + start * row
            )
            chunks.append(read_tensor(part)[inside])
    return torch.cat(chunks)


def _remap(module: Any, used: Tensor) -> Any:
    """Let an embedding that holds the used rows only take the original token numbers."""
    lookup = torch.zeros(module.num_embeddings, dtype=torch.int64, device=used.device)
    lookup[used] = torch.arange(len(used), device=used.device)
    module.padding_idx = None
    return module.register_forward_pre_hook(lambda _, args: (lookup[args[0]], *args[1:]))
