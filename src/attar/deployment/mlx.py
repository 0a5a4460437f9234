"""Export to a folder that mlx-lm loads: packed words, scales and biases (formats/mlx.py) under the names of
mlx-lm's model classes, experts stacked.

    plan      each tensor's name in mlx-lm, and how it is coded                  (headers alone)
    write     codes of the source unchanged; what is dense rounded, or as it is  (streamed)
    verify    every quantized matrix decoded and compared with the source's

A quantized checkpoint's codes are carried; its dense Linears and embeddings stay dense without ``--bits``. A
dense checkpoint is rounded here, to 4 bits in groups of 64 where nothing is asked for, as mlx-lm does. mlx-lm
renames tensors when it loads a checkpoint, and leaves alone what has its own names already: these are
written. config.json gets what mlx-lm's classes ask for and transformers 5 no longer writes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from attar.checkpoint.atomic import write_config
from attar.checkpoint.companions import copy_companions
from attar.checkpoint.mlx_folder import FAMILIES, mlx_name
from attar.checkpoint.open import Checkpoint
from attar.checkpoint.output import StageOutput
from attar.checkpoint.shards import TensorSpec
from attar.checkpoint.tensors import TensorInfo, read_tensor, stored_dtype
from attar.checkpoint.weight_files import read_tensors
from attar.deployment.integers import rounds_activations, routers_of
from attar.deployment.settings import ExportSettings
from attar.deployment.verify import check_fits, compare
from attar.errors import ModelError, NumericsError
from attar.formats import mlx
from attar.formats.mlx import MLXRule
from attar.formats.readers import Decoded, DecodedInfo, quant_method, reader
from attar.models.anatomy.roles import is_linear
from attar.models.loading.configs import parse_config
from attar.models.loading.empty import empty_model
from attar.models.loading.single_experts import single_experts
from attar.models.loading.stored import stored_buffers, stored_names, stored_precision
from attar.progress import Progress
from attar.quantization.grids import IntGrid, MXFP4Grid, MXFP8Grid, NVFP4Grid
from attar.quantization.grids.scales import choose_scales
from attar.walks.stream import WriteStep, stream_steps

LAYOUTS = ("compressed-tensors", "gptq", "awq")
"""Layouts whose codes are carried."""
USUAL = MLXRule(mlx.AFFINE, 4, 64)
"""Of a dense checkpoint where nothing is asked for."""
NVFP4_PEAK = 448.0 * 6.0
"""A peak under which the grid's global scale is 1: MLX has none."""
LOST = 0.5
"""Relative error of a rounded matrix that is refused."""
NO_WINDOW = ("gemma2", "mistral", "starcoder2", "phi3")
"""Families that mlx-lm runs without their sliding window."""
EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class _Matrix:
    """Tensors of the source that become one tensor of the output, or one quantized matrix.

    Attributes:
        name: of the output, without the last part where it is quantized.
        parts: names in the source: one, or those of a stack's experts.
        stacked: whether the output has a first dimension of experts.
        transposed: the source holds it in x out, mlx-lm out x in.
        rule: None: dense.
    """

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    stacked: bool = False
    transposed: bool = False
    rule: MLXRule | None = None


def keeps_mtp(source: Checkpoint) -> bool:
    """mlx-lm loads no multi-token prediction head."""
    return False


def refuse(source: Checkpoint, settings: ExportSettings) -> None:
    """Raise where a checkpoint cannot become an MLX folder.

    Raises:
        ModelError: mlx-lm's names of the family are not known, or MLX cannot hold codes of the checkpoint.
    """
    family = source.config["model_type"]
    if family not in FAMILIES:
        raise ModelError(
            f"{source.spelling}: attar cannot write {family!r} for MLX",
            hint=f"it writes {', '.join(FAMILIES)}; mlx_lm.convert may know more",
        )
    layout = quant_method(source)
    if layout not in (None, *LAYOUTS):
        raise ModelError(
            f"{source.path} is in the layout of {layout}, whose codes are not carried to MLX",
            hint="first attar export --format compressed-tensors, or --format dense",
        )
    if rounds_activations(source):
        raise ModelError(
            f"{source.path} rounds activations as well, for which MLX has no place",
            hint="quantize with a scheme of weights alone, such as W4A16",
        )
    plan = MLXPlan(source, settings)
    if plan.dense_rule and not any(matrix.rule for matrix in plan.matrices):
        raise ModelError(
            f"{source.spelling}: no matrix has inputs in whole groups of {plan.dense_rule.group_size}",
            hint="--group-size 32",
        )
    carried = ((matrix, part) for matrix in plan.matrices for part in matrix.parts if plan.is_carried(part))
    for matrix, part in islice(carried, 1):
        plan.encoded(matrix, part)


class MLXPlan:
    """What becomes of each tensor.

    Attributes:
        matrices: in the order of the output.
        unused: stored tensors that are no part of the model.
    """

    def __init__(self, source: Checkpoint, settings: ExportSettings) -> None:
        self.source, self.settings = source, settings
        self.view = single_experts(Decoded(source) if quant_method(source) else source)
        self.read: Any = reader(source)
        config = {key: value for key, value in source.config.items() if key != "quantization_config"}
        model = empty_model(config, unstacked=True)
        names = stored_names(model, self.view)
        self.dtype = stored_precision(source) if settings.dtype == "auto" else getattr(torch, settings.dtype)
        linears = {
            names.get(f"{name}.weight"): module for name, module in model.named_modules() if is_linear(module)
        }
        self.turned = {stored for stored, module in linears.items() if isinstance(module, Conv1D)}
        embedding = _embedding(model, names)
        dense = {f"{name}.weight" for name in routers_of(model, names)}
        self.roundable = {name for name in (*linears, embedding) if name and name not in dense}
        self.dense_rule = _dense_rule(settings, dense=quant_method(source) is None)
        stored = dict.fromkeys((*names.values(), *stored_buffers(model, self.view).values()))
        self.unused = [name for name in self.view.tensors if name not in stored]
        self.matrices = self._matrices([name for name in self.view.tensors if name in stored])

    def _matrices(self, stored: Sequence[str]) -> list[_Matrix]:
        stacks: dict[str, list[str]] = {}
        for name in stored:
            expert = EXPERT.match(name)
            stacks.setdefault(f"{expert[1]}.{expert[3]}" if expert else name, []).append(name)
        return [self._matrix(name, parts) for name, parts in stacks.items()]

    def _matrix(self, name: str, parts: list[str]) -> _Matrix:
        stacked = bool(EXPERT.match(parts[0]))
        parts.sort(key=lambda part: int(EXPERT.match(part)[2]) if stacked else 0)  # type: ignore[index]
        rules = {self._rule(part) for part in parts}
        if len(rules) > 1:
            raise ModelError(
                f"{self.source.path}: the experts of {name} are coded differently, and MLX stacks them",
                hint="quantize without --bits, or all experts with one scheme",
            )
        module, _, leaf = name.rpartition(".")
        module = mlx_name(module, self.source.config["model_type"])
        shape, turned = tuple(self.view.tensors[parts[0]].shape), parts[0] in self.turned
        shape = shape[::-1] if turned else shape
        (rule,) = rules
        target = f"{module}.{leaf}" if rule is None else module
        return _Matrix(target, tuple(parts), shape, stacked, turned, rule)

    def _rule(self, name: str) -> MLXRule | None:
        info = self.view.tensors[name]
        if self.is_carried(name):
            carried = mlx.carried_rule(*self.read.rule_and_shape(info.stored))
            if isinstance(carried, str):
                raise ModelError(
                    f"{self.source.path}: {name}: {carried}", hint="--format dense, then --format mlx"
                )
            return carried
        rule = self.dense_rule if name in self.roundable else None
        inputs = info.shape[0] if name in self.turned else info.shape[-1]
        return rule if rule is not None and inputs % rule.group_size == 0 else None

    def specs(self, matrix: _Matrix) -> list[TensorSpec]:
        """Names, types and shapes of the output of a matrix."""
        lead = (len(matrix.parts),) if matrix.stacked else ()
        if matrix.rule is None:
            kind = self.view.tensors[matrix.parts[0]].dtype
            kind = stored_dtype(self.dtype) if kind in ("F64", "F32", "F16", "BF16") else kind
            return [TensorSpec(matrix.name, kind, (*lead, *matrix.shape))]
        rows, columns = matrix.shape
        parts = mlx.layout((rows, columns), matrix.rule, stored_dtype(self.dtype))
        return [
            TensorSpec(f"{matrix.name}.{leaf}", kind, (*lead, *shape))
            for leaf, (kind, shape) in parts.items()
        ]

    def tensors(self, matrix: _Matrix) -> dict[str, Tensor]:
        """The output of a matrix, see :meth:`specs`."""
        if matrix.rule is None:
            values = [self.dense(matrix, part) for part in matrix.parts]
            return {matrix.name: torch.stack(values) if matrix.stacked else values[0]}
        encoded = [self.encoded(matrix, part) for part in matrix.parts]
        return {
            f"{matrix.name}.{leaf}": torch.stack([part[leaf] for part in encoded])
            if matrix.stacked
            else value
            for leaf, value in encoded[0].items()
        }

    def is_carried(self, name: str) -> bool:
        """Whether a tensor of the view is stored as codes."""
        return isinstance(self.view.tensors[name], DecodedInfo) and self.read.is_coded(
            self.view.tensors[name].stored
        )

    def encoded(self, matrix: _Matrix, part: str) -> dict[str, Tensor]:
        """The tensors of one quantized matrix of the source."""
        assert matrix.rule is not None
        if not self.is_carried(part):
            return rounded(self.dense(matrix, part), matrix.rule, self.dtype)
        weight, rule = self.read.codes(self.view.tensors[part].stored)
        if rule.ordered:
            raise ModelError(
                f"{self.source.path}: {part}: its groups are not neighbouring inputs (act-order)"
            )
        exact = weight.scale.to(torch.float8_e4m3fn).float() == weight.scale
        if matrix.rule.mode == "nvfp4" and not exact.all():
            raise ModelError(
                f"{self.source.path}: {part}: its scales are not float8, and MLX has no global scale",
                hint="--type nvfp4 from the dense model it was made from, or MXFP4A16",
            )
        return mlx.encode(weight, rule, matrix.rule, self.dtype)

    def dense(self, matrix: _Matrix, part: str) -> Tensor:
        """A dense tensor as mlx-lm has it: out x in, in the number type of the output."""
        tensor: Tensor = self.view.load(part)
        tensor = tensor.T.contiguous() if matrix.transposed else tensor
        if not tensor.is_floating_point():
            return tensor
        check_fits(part, tensor.to(self.dtype))
        return tensor.to(self.dtype)


def rounded(weight: Tensor, rule: MLXRule, dtype: torch.dtype) -> dict[str, Tensor]:
    """A dense weight (N, K) rounded to nearest, the range of each group chosen by least squared error. Codes
    of affine are chosen for scales and biases as they are stored."""
    if rule.mode == mlx.AFFINE:
        grid = IntGrid(rule.bits, rule.group_size, symmetric=False, storage=dtype)
        chosen = choose_scales(weight, grid, "mse")
        assert chosen.zero is not None
        scale, bias = chosen.scale, (-chosen.scale * (chosen.zero - grid.low)).to(dtype)
        tiled = weight.float().unflatten(1, (-1, rule.group_size))
        codes = ((tiled - bias.float()[..., None]) / scale[..., None]).round_().clamp_(0, 2**rule.bits - 1)
        return mlx.affine(codes.flatten(1), scale.to(dtype), bias, rule.bits)
    grid_of: dict[str, Callable[[], Any]] = {
        "nvfp4": partial(NVFP4Grid, peak=NVFP4_PEAK),
        "mxfp4": MXFP4Grid,
        "mxfp8": MXFP8Grid,
    }
    floats = grid_of[rule.mode]()
    quantized = floats.quantize(weight, choose_scales(weight, floats, "mse"))
    return mlx.encode_float(quantized.codes, quantized.parameters.scale, rule)


def write(source: Checkpoint, settings: ExportSettings, output: StageOutput, progress: Progress) -> list[str]:
    """Write the folder; returns what was checked, as sentences."""
    plan = MLXPlan(source, settings)
    write_config(output.folder / "config.json", mlx_config(source.config, plan))
    steps = [WriteStep(plan.specs(matrix), partial(plan.tensors, matrix)) for matrix in plan.matrices]
    work = output.shared / "shards"
    stream_steps(
        steps, output.folder, work=work, processes=output.processes, progress=progress, what="export mlx"
    )
    output.exit_unless_rank0()
    copy_companions(source.path, output.folder)
    output.details["notes"] = _notes(plan)
    return _verify(plan, read_tensors(output.folder)[0], progress)


def mlx_config(config: Mapping[str, Any], plan: MLXPlan) -> dict[str, Any]:
    """config.json for mlx-lm: the source's, what transformers fills in and mlx-lm has other defaults for, and
    rotary settings under the names that they had before transformers 5."""
    stated = {
        key: value for key, value in config.items() if key not in ("quantization_config", "torch_dtype")
    }
    parsed = parse_config(stated)
    common = PretrainedConfig().to_dict()
    filled = {key: value for key, value in parsed.to_dict().items() if key not in common}
    full = {**filled, **stated, "dtype": str(plan.dtype).removeprefix("torch.")}
    for name in parsed.attribute_map:
        full.setdefault(name, getattr(parsed, name, None))
    full = {**_flat_rope(full.get("rope_parameters") or {}), **full}
    if "n_positions" in full:
        full.setdefault("n_ctx", full["n_positions"])
    if "full_attention" in (full.get("layer_types") or ()):
        full.setdefault("sliding_window_pattern", full["layer_types"].index("full_attention") + 1)
    counts = Counter(matrix.rule for matrix in plan.matrices if matrix.rule is not None)
    usual = counts.most_common(1)[0][0]
    others = {
        matrix.name: matrix.rule.config() for matrix in plan.matrices if matrix.rule not in (None, usual)
    }
    quantization = {**usual.config(), **others}
    return {
        **full,
        "quantization": quantization,
        "quantization_config": {"quant_method": mlx.METHOD, **quantization},
    }


def _flat_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` as the keys ``rope_theta``, ``rope_scaling`` and so on."""
    local = rope.get("sliding_attention")
    if isinstance(local, dict):
        return {**_flat_rope(rope["full_attention"]), "rope_local_base_freq": local["rope_theta"]}
    theta, part = rope.get("rope_theta", 10000.0), rope.get("partial_rotary_factor", 1.0)
    scaling = {
        key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")
    }
    flat = {"rope_theta": theta, "partial_rotary_factor": part, "rotary_emb_base": theta, "rotary_pct": part}
    return {**flat, "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None}


def _dense_rule(settings: ExportSettings, *, dense: bool) -> MLXRule | None:
    """How dense matrices are rounded; None: they are not."""
    if settings.type != "auto":
        return mlx.float_rule(settings.type)
    bits = settings.bits or (USUAL.bits if dense or settings.group_size else 0)
    return MLXRule(mlx.AFFINE, int(bits), settings.group_size or USUAL.group_size) if bits else None


def _embedding(model: nn.Module, names: Mapping[str, str]) -> str | None:
    """The stored name of the input embedding."""
    table = model.get_input_embeddings()  # type: ignore[operator]
    return next(
        (names.get(f"{name}.weight") for name, module in model.named_modules() if module is table), None
    )


def _notes(plan: MLXPlan) -> list[str]:
    """What a user may not expect, as sentences."""
    notes = []
    dense = [
        matrix.name for matrix in plan.matrices if matrix.rule is None and matrix.parts[0] in plan.roundable
    ]
    if dense:
        stay = "matrices stay dense, such as" if len(dense) > 1 else "matrix stays dense:"
        notes.append(f"{len(dense)} {stay} {dense[0]}")
    if plan.unused:
        notes.append(
            f"{len(plan.unused)} tensors are no part of the model and left out: {plan.unused[0]} ..."
        )
    window = plan.source.config.get("sliding_window")
    if window and plan.source.config["model_type"] in NO_WINDOW:
        notes.append(f"mlx-lm attends to all tokens, this model to the last {window:,}: longer texts differ")
    return notes


def _verify(plan: MLXPlan, written: Mapping[str, TensorInfo], progress: Progress) -> list[str]:
    """Read every quantized matrix back: carried codes are compared with the source's, a rounded matrix with
    the dense one.

    Raises:
        NumericsError: codes differ, or rounding lost most of a matrix.
    """
    matrices = [matrix for matrix in plan.matrices if matrix.rule is not None]
    carried, worst = 0, 0.0
    with progress.task("verify", total=len(matrices)) as task:
        for matrix in matrices:
            leaves = [spec.name.rpartition(".")[2] for spec in plan.specs(matrix)]
            stored = {leaf: read_tensor(written[f"{matrix.name}.{leaf}"]) for leaf in leaves}
            for number, part in enumerate(matrix.parts):
                tensors = (
                    {leaf: value[number] for leaf, value in stored.items()} if matrix.stacked else stored
                )
                if plan.is_carried(part):
                    carried += 1
                    _same(part, plan.encoded(matrix, part), tensors)
                else:
                    worst = max(worst, _lost(part, plan.dense(matrix, part).float(), tensors, matrix))
            task.advance()
    lines = [f"{carried} matrices with the same codes"] if carried else []
    return lines + ([f"rounded matrices differ from the dense ones by at most {worst:.1%}"] if worst else [])


def _same(name: str, wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for leaf, value in wanted.items():
        compare(f"{name} ({leaf})", value, tensors[leaf], None)


def _lost(name: str, dense: Tensor, tensors: Mapping[str, Tensor], matrix: _Matrix) -> float:
    """The relative error of a rounded matrix.

    Raises:
        NumericsError: it is not finite, or larger than :data:`LOST`.
    """
    assert matrix.rule is not None
    error = mlx.decode(tensors, matrix.rule).sub_(dense).norm() / dense.norm().clamp(min=1e-30)
    if not error < LOST:
        raise NumericsError(
            f"{name}: {matrix.rule.mode} loses {float(error):.0%} of it", hint="--bits 4, or another --type"
        )
    return float(error)
