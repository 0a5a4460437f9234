"""The limits of a packed checkpoint in the engines that load it, in plain sentences.

Tensor parallelism splits a Linear (N, K) along its outputs, or, where its inputs are the outputs of such a
Linear (o_proj, down_proj), along its inputs. A split must not divide a group, a block, a word of packed codes
or an attention head; heads of keys and values may be repeated on several devices instead.

    along the outputs    N / TP whole; whole words where codes or zero points are packed that way
    along the inputs     K / TP whole, a multiple of g; whole words likewise

With act-order every device keeps all scales, and groups do not matter.

Codes that the kernels support, by their sources:

    Marlin (vLLM, GPTQModel)    4 bits and 8, without zero points; 4 bits with; groups of 32, 64, 128 or the
                                row; N % 64 and K % 128 (vLLM of mid-2026 pads instead, but for act-order)
    ExLlama                     GPTQModel: 4 bits, N % 32 and K % 32; vLLM: 4 and 8 bits, float16
    torch (GPTQModel)           groups of 16 to 1024 (AWQ: to 128) or the row; 3 bits: N % 32 and K % 32;
                                on a CPU, 4 bits: groups of 32 to 256, where another is not asked for

Sources: vLLM, quantization/auto_gptq.py, auto_awq.py, utils/marlin_utils.py, utils/gptq_utils.py,
kernels/linear/mixed_precision/, model_loader/bitsandbytes_loader.py; GPTQModel 7.6, nn_modules/qlinear/;
optimum 2.3, gptq/quantizer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attar.formats.rules import WeightRule

DEGREES = (1, 2, 4, 8, 16)
ROW = ("o_proj", "down_proj", "out_proj", "dense", "dense_4h_to_h", "c_proj", "fc2", "wo", "w2")
"""Last parts of the names of Linears that are split along their inputs."""
QUERY, KEYS = ("q_proj",), ("k_proj", "v_proj")
ATTENTION, GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
SETS = {**dict.fromkeys(ATTENTION, ATTENTION), **dict.fromkeys(GATED, GATED)}
"""Linears of one input, which vLLM fuses."""
MARLIN_GROUPS = (0, 32, 64, 128)
TORCH_GROUPS = {"gptq": (0, 16, 32, 64, 128, 256, 512, 1024), "awq": (0, 16, 32, 64, 128)}
HEAD = "lm_head"
CPU_BACKENDS = {"gptq": "gptq_torch", "awq": "torch_awq"}

Shapes = Mapping[str, tuple[int, int]]
WeightRules = Mapping[str, WeightRule]


def limits(
    format: str,
    shapes: Shapes,
    rules: WeightRule | WeightRules,
    *,
    heads: int = 0,
    kv_heads: int = 0,
    activations: bool = False,
) -> list[str]:
    """The limits of a packed checkpoint, each with the first layer that has it; the first is of tensor
    parallelism. Empty for an unknown format.

    Args:
        format: ``gptq``, ``awq``, ``compressed-tensors``, ``modelopt`` or ``bitsandbytes``.
        shapes: (N, K) of the quantized Linears, by module name.
        rules: of their weights, one for all or by module name.
        heads: attention heads of the model; 0: unknown.
        kv_heads: heads of keys and values; 0: as many as ``heads``.
        activations: inputs are rounded as well; other kernels run them, without these limits.
    """
    if not shapes or format not in ("gptq", "awq", "compressed-tensors", "modelopt", "bitsandbytes"):
        return []
    if format == "bitsandbytes":
        return ["tensor parallel: vLLM does not split bitsandbytes weights; it splits the model by layers"]
    named = dict.fromkeys(shapes, rules) if isinstance(rules, WeightRule) else rules
    sentences = [_parallel(format, shapes, named, heads, kv_heads or heads), *_fused(named)]
    checks: tuple[LimitCheck, ...] = () if activations else (kernels, _marlin_groups, _marlin_shapes)
    checks += (_torch_groups, _cpu_groups, _whole_blocks, _act_order, _second_version, _one_rule, _head)
    return [*sentences, *filter(None, (check(format, shapes, named) for check in checks))]


LimitCheck = Callable[[str, Shapes, WeightRules], str | None]


def _parallel(format: str, shapes: Shapes, rules: WeightRules, heads: int, kv_heads: int) -> str:
    """The largest number of devices, and the reason against more."""

    def problems(degree: int) -> list[tuple[str, str]]:
        reasons = (
            (name, _why_unsplit(format, name, shape, rules[name], degree, heads, kv_heads))
            for name, shape in shapes.items()
        )
        return [(name, why) for name, why in reasons if why]

    good = [degree for degree in DEGREES if not problems(degree)]
    best = good[-1] if good else 0
    if best == DEGREES[-1]:
        return f"tensor parallel: up to {best} devices, and no more were considered"
    bad = problems(next(degree for degree in DEGREES if degree > best))
    reason = f"{bad[0][0]} {bad[0][1]}{_more(bad[1:])}"
    if not best:
        return f"tensor parallel: not even one device, in vLLM: {reason}"
    return f"tensor parallel: up to {best} device{'s' if best > 1 else ''}; on {2 * best}, {reason}"


def _why_unsplit(
    format: str,
    name: str,
    shape: tuple[int, int],
    rule: WeightRule,
    degree: int,
    heads: int,
    kv_heads: int,
) -> str | None:
    """Why a Linear cannot be split over ``degree`` devices; None where it can."""
    leaf, (rows, columns) = name.rpartition(".")[2], shape
    if leaf in QUERY and heads % degree:
        return f"has {heads} heads, which {degree} devices cannot share"
    if leaf in KEYS and kv_heads % degree and degree % kv_heads:
        return f"has {kv_heads} heads of keys and values, which {degree} devices can neither share nor repeat"
    size, kind = (columns, "inputs") if leaf in ROW else (rows, "outputs")
    parts = min(degree, kv_heads) if leaf in KEYS and kv_heads else degree
    if size % parts:
        return f"has {size} {kind}, which {degree} devices cannot share"
    share = size // parts
    inputs = share if leaf in ROW else columns
    height, width = rule.block or (1, rule.group_size or 1)
    if inputs % width and not rule.ordered:
        return f"keeps {inputs} inputs a device, no multiple of the group size {width}"
    if kind == "outputs" and share % height:
        return f"keeps {share} outputs a device, no multiple of the block height {height}"
    if _packed(format, rule, kind) and share * rule.bits % 32:
        return f"keeps {share} {kind} a device, which fill no whole words of {rule.bits}-bit codes"
    return None


def _packed(format: str, rule: WeightRule, kind: str) -> bool:
    """Whether codes or zero points are packed into words along the split axis."""
    if rule.kind != "int" or format == "modelopt":
        return False
    if format == "awq":
        return kind == "outputs"
    return kind == "inputs" or format == "gptq" or not rule.symmetric


def _fused(rules: WeightRules) -> list[str]:
    """Sets of Linears that vLLM fuses, but whose codes differ."""
    differing: list[tuple[str, str]] = []
    for name in rules:
        parent, _, leaf = name.rpartition(".")
        members = SETS.get(leaf, ())
        known = [rules.get(f"{parent}.{other}" if parent else other) for other in members]
        if any(rule != known[0] for rule in known):
            differing.append((parent, ", ".join(members)))
    differing = list(dict.fromkeys(differing))
    if not differing:
        return []
    parent, joined = differing[0]
    return [
        f"vLLM makes one Linear of {joined}, which need the same codes; the codes of {parent} differ"
        f"{_more(differing[1:])}: it will refuse the model"
    ]


def kernels(format: str, shapes: Shapes, rules: WeightRules) -> str | None:
    """Codes for which vLLM has no kernel, in a sentence; None where it has one for all, and for formats other
    than ``gptq`` and ``compressed-tensors``. ``rules`` are the rules of weights whose inputs are not
    rounded."""
    if format not in ("gptq", "compressed-tensors"):
        return None
    odd = [name for name, rule in rules.items() if rule.kind == "int" and not _marlin(format, rule)]
    if not odd:
        return None
    rule = rules[odd[0]]
    zeros = "symmetric" if rule.symmetric else "asymmetric"
    if format == "gptq":
        return (
            f"vLLM loads GPTQ of 4 or 8 bits, symmetric; {odd[0]} has {rule.bits} bits, {zeros}"
            f"{_more(odd[1:])}: newer versions refuse it, transformers and GPTQModel run it"
        )
    return (
        f"vLLM loads packed codes of 4 or 8 bits, and zero points with 4; {odd[0]} has {rule.bits} bits, "
        f"{zeros}{_more(odd[1:])}: transformers decodes it, vLLM refuses it without Humming"
    )


def _marlin(format: str, rule: WeightRule) -> bool:
    """Whether Marlin has these codes."""
    if rule.kind != "int":
        return False
    if rule.symmetric:
        return rule.bits in (4, 8)
    return rule.bits == 4 and format != "gptq"


def _marlin_groups(format: str, shapes: Shapes, rules: WeightRules) -> str | None:
    """Group sizes that Marlin has not."""
    odd = [
        name
        for name, rule in rules.items()
        if _marlin(format, rule) and rule.strategy != "tensor" and rule.group_size not in MARLIN_GROUPS
    ]
    if not odd:
        return None
    return (
        f"Marlin has groups of 32, 64, 128 or the whole row; {odd[0]} has groups of "
        f"{rules[odd[0]].group_size}{_more(odd[1:])}: vLLM takes a slower kernel or refuses it"
    )


def _marlin_shapes(format: str, shapes: Shapes, rules: WeightRules) -> str | None:
    """Shapes that Marlin does not tile."""
    odd = [
        name
        for name, (rows, columns) in shapes.items()
        if _marlin(format, rules[name]) and (rows % 64 or columns % 128)
    ]
    if not odd:
        return None
    then = "vLLM refuses it" if rules[odd[0]].ordered else "older vLLM takes another kernel, newer pads it"
    return (
        f"Marlin wants multiples of 64 outputs and 128 inputs; {odd[0]} has {_size(shapes[odd[0]])}"
        f"{_more(odd[1:])}: {then}"
    )


def _torch_groups(format: str, shapes: Shapes, rules: WeightRules) -> str | None:
    """Group sizes that no kernel of GPTQModel, which transformers uses, has."""
    known = TORCH_GROUPS.get(format)
    odd = [name for name, rule in rules.items() if known and rule.group_size not in known]
    if not odd or known is None:
        return None
    return (
        f"transformers and GPTQModel have groups of {', '.join(map(str, known[1:]))} or the whole row; "
        f"{odd[0]} has groups of {rules[odd[0]].group_size}{_more(odd[1:])}: they refuse it"
    )


def _whole_blocks(format: str, shapes: Shapes, rules: WeightRules) -> str | None:
    """Shapes that GPTQ's kernels do not unpack."""
    if format != "gptq":
        return None
    odd = [name for name, (rows, columns) in shapes.items() if rows % 32 or columns % 32]
    if not odd:
        return None
    three = next((name for name in odd if rules[name].bits == 3), None)
    name = three or odd[0]
    what = "3-bit kernels unpack 32 codes at once" if three else "ExLlama wants multiples of 32"
    then = "they fail" if three else "it is passed over for a slower kernel"
    others = _more([tensor for tensor in odd if tensor != name])
    return f"{what}; {name} has {_size(shapes[name])}{others}: {then}"


def _act_order(format: str, shapes: Shapes, rules: WeightRules) -> str | None:
    """Kernels that cannot split inputs whose groups are not neighbours."""
    odd = [name for name in shapes if rules[name].ordered and name.rpartition(".")[2] in ROW]
    if not odd:
        return None
    return (
        f"act-order: on several devices ExLlama and Machete refuse {odd[0]}{_more(odd[1:])}, which are cut "
        "along their inputs; Marlin keeps all scales on each device"
    )


def _second_version(format: str, shapes: Shapes, rules: WeightRules) -> str | None:
    """Readers that read GPTQ's second version as the first."""
    if format != "gptq" or all(rule.symmetric for rule in rules.values()):
        return None
    return (
        "asymmetric, so gptq_v2: vLLM before October 2025 takes it for the first version and writes nonsense"
    )


def _one_rule(format: str, shapes: Shapes, rules: WeightRules) -> str | None:
    """Readers that have one rule for all Linears."""
    if format != "gptq":
        return None
    kinds = {name: (rule.bits, rule.group_size, rule.symmetric) for name, rule in rules.items()}
    first = next(iter(kinds))
    odd = [name for name, kind in kinds.items() if kind != kinds[first]]
    if not odd:
        return None
    return (
        f"transformers knows one rule for all Linears, and {odd[0]}{_more(odd[1:])} differs from {first}: "
        "it refuses the model; GPTQModel and vLLM follow dynamic"
    )


def _head(format: str, shapes: Shapes, rules: WeightRules) -> str | None:
    """Readers that expect a dense head."""
    if format not in ("gptq", "awq") or HEAD not in shapes:
        return None
    return (
        f"transformers takes {HEAD} to be dense and leaves it random, without an error; GPTQModel decodes it"
    )


def _cpu_groups(format: str, shapes: Shapes, rules: WeightRules) -> str | None:
    """Group sizes that transformers' CPU kernel does not have."""
    odd = [name for name, rule in rules.items() if rule.bits == 4 and rule.group_size == 16]
    if format not in ("gptq", "awq") or not odd:
        return None
    return (
        f"on a CPU transformers takes a kernel of torch that has no groups of 16, as {odd[0]} has"
        f"{_more(odd[1:])}: it fails on the first pass, but for backend {CPU_BACKENDS[format]}"
    )


def _size(shape: tuple[int, int]) -> str:
    return f"{shape[0]} outputs and {shape[1]} inputs"


def _more(others: list[str] | list[tuple[str, str]]) -> str:
    return f" (and {len(others)} more)" if others else ""
