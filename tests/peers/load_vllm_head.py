"""Reads draft heads with vLLM's own code: its config conversion, its model classes, their ``load_weights``.

    python load_vllm_head.py FILES TARGET FOLDER...

FILES are vLLM's Python files, TARGET is JSON with layers and vocabulary; prints a list with an object for
each folder.

vLLM itself is not installed. The files under ``transformers_utils`` and ``model_executor/models`` are its
own; every other module of it is a stand-in: layers have their parameters in the shapes that vLLM's
constructors are given, the rest is nothing at all. So a tensor that vLLM's model has no place for, that has
another shape, or that is missing, is seen as vLLM would see it.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import nn

SHARED = ("model.embed_tokens.weight", "lm_head.weight")  # the target's, in a head without its own
OWN = ("transformers_utils.configs", "model_executor.models")
TARGET = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}


class Nothing:
    """Stands for whatever a module of vLLM's has: a decorator, a base class, a function, a type."""

    def __call__(self, *args, **options):
        return args[0] if len(args) == 1 and callable(args[0]) and not options else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __mro_entries__(self, bases):
        return ()

    def __getitem__(self, item):
        return self

    def __or__(self, other):
        return self

    __ror__ = __or__

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False


class RMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6, **options):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.variance_epsilon = eps


class Linear(nn.Module):
    """Any Linear; the parts of a merged one are parameters of their own, as checkpoints have them."""

    def __init__(self, inputs, outputs, bias=False, parts=None):
        super().__init__()
        self.input_size, self.parts = inputs, parts
        for name, size in (parts or {"": outputs}).items():
            setattr(self, f"{name}weight", nn.Parameter(torch.zeros(size, inputs)))
            if bias:
                setattr(self, f"{name}bias", nn.Parameter(torch.zeros(size)))


def replicated(input_size, output_size, bias=True, **options):
    return Linear(input_size, output_size, bias)


def qkv(hidden_size, head_size, total_num_heads, total_num_kv_heads=None, bias=True, **options):
    kv = (total_num_kv_heads or total_num_heads) * head_size
    sizes = {"q_": total_num_heads * head_size, "k_": kv, "v_": kv}
    return Linear(hidden_size, 0, bias, sizes)


def merged(input_size, output_sizes, bias=True, **options):
    return Linear(input_size, 0, bias, dict(zip(("gate_", "up_"), output_sizes, strict=True)))


class Embedding(nn.Module):
    def __init__(self, num_embeddings, embedding_dim, bias=False, **options):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_embeddings, embedding_dim))
        self.tp_size = 1


class Loader:
    """For AutoWeightsLoader: every tensor to its parameter, by vLLM's own mapper."""

    def __init__(self, module, **options):
        self.module = module

    def load_weights(self, weights, *, mapper=None):
        module, merges = self.module, self.merges()
        parameters = dict(module.named_parameters())
        skipped = {old for old, new in (mapper.orig_to_new_substr.items() if mapper else ()) if new is None}
        renames = getattr(getattr(module, "model", None), "hf_to_vllm_mapper", None)
        renames = renames.orig_to_new_substr if renames is not None else {}
        for name, tensor in weights:
            if any(part in name for part in skipped):
                REPORT["ignored"].append(name)
                continue
            for old, new in renames.items():
                name = name.replace(old, new)
            name = name.replace("midlayer.", "layers.0.")
            for old, new in merges.items():
                name = name.replace(old, new)
            parameter = parameters.pop(name, None)
            if parameter is None or parameter.shape != tensor.shape:
                found = "no parameter" if parameter is None else f"of {tuple(parameter.shape)}"
                REPORT["unknown"].append(f"{name} {tuple(tensor.shape)}: {found}")
        module.model._build_fused_kv_buffers = lambda: None  # of the loaded weights
        left = [name for name in parameters if not any(part in name for part in skipped)]
        REPORT["shared"] = [name for name in left if name in SHARED and name not in REPORT["own"]]
        REPORT["missing"] = [name for name in left if name not in REPORT["shared"]]
        return set()

    @staticmethod
    def merges():
        """Names in a checkpoint to those of the parts of merged parameters."""
        parts = {f".{name}_proj.": f".qkv_proj.{name}_" for name in "qkv"}
        return parts | {f".{name}_proj.": f".gate_up_proj.{name}_" for name in ("gate", "up")}


LAYERS = {
    "RMSNorm": RMSNorm,
    "ReplicatedLinear": replicated,
    "RowParallelLinear": replicated,
    "ColumnParallelLinear": replicated,
    "QKVParallelLinear": qkv,
    "MergedColumnParallelLinear": merged,
    "ParallelLMHead": Embedding,
    "VocabParallelEmbedding": Embedding,
    "Attention": lambda *args, **options: SimpleNamespace(layer_name=""),
    "LogitsProcessor": lambda *args, **options: SimpleNamespace(scale=1.0),
    "get_tensor_model_parallel_world_size": lambda: 1,
    "get_tensor_model_parallel_rank": lambda: 0,
    "divide": lambda a, b: a // b,
    "VllmConfig": SimpleNamespace,
    "get_pp_group": lambda: SimpleNamespace(
        is_first_rank=True, is_last_rank=True, world_size=1, rank_in_group=0
    ),
    "get_current_vllm_config": lambda: VLLM,
    "make_deferred_module_factory": lambda factory: factory,
    "set_default_rope_theta": lambda config, default_theta: None,
    "init_logger": lambda name: Nothing(),
    "without_trust_remote_code": dict,
    "get_hf_file_bytes": lambda *args, **options: None,
}
LAYERS["get_eagle3_aux_layers_from_config"] = lambda config: aux_layers(config)
VLLM = SimpleNamespace()
REPORT = {}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """vLLM's own files for the packages in OWN, stand-ins for the others."""

    def __init__(self, files):
        self.files = files

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "vllm":
            return None
        file = self.files / Path(*name.split(".")).with_suffix(".py")
        if name.removeprefix("vllm.").startswith(tuple(f"{own}." for own in OWN)) and file.is_file():
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: missing(name)
        return module

    def exec_module(self, module):
        module.__path__ = []


def missing(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return LAYERS.get(name, Nothing())


def aux_layers(speculative_config):
    """What eagle3_utils.py of vLLM's gives, from its own file."""
    file = FILES / "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
    spec = importlib.util.spec_from_file_location("eagle3_utils", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_eagle3_aux_layers_from_config(speculative_config)


def read(folder):
    """What vLLM makes of a folder."""
    from transformers import AutoConfig

    stored = json.loads((folder / "config.json").read_text())
    REPORT.clear()
    REPORT.update(unknown=[], missing=[], ignored=[], own=[], method=None)
    if "speculators_config" in stored:
        from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

        REPORT.update(SpeculatorsConfig.extract_vllm_speculative_config(json.loads(json.dumps(stored))))
        config = SpeculatorsConfig.extract_transformers_pre_trained_config(stored)
    else:
        config = {**stored, "attar": None}
    hf = AutoConfig.for_model(config["model_type"], **{k: v for k, v in config.items() if k != "model_type"})
    for key, value in config.items():
        if key != "rope_theta" and not hasattr(hf, key):
            setattr(hf, key, value)
    draft = SimpleNamespace(hf_config=hf, model=str(folder), revision=None)
    VLLM.speculative_config = SimpleNamespace(
        draft_model_config=draft, kv_cache_dtype=None, parallel_drafting=False
    )
    VLLM.model_config = SimpleNamespace(
        hf_config=hf,
        dtype=torch.float32,
        get_total_num_hidden_layers=lambda: TARGET["layers"],
        get_num_layers=lambda parallel: TARGET["layers"],
        get_vocab_size=lambda: TARGET["vocabulary"],
    )
    VLLM.cache_config, VLLM.parallel_config, VLLM.quant_config = None, None, None
    VLLM.use_v2_model_runner = True
    model = CLASSES[config["architectures"][0]](vllm_config=VLLM, prefix="")
    model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    names = (
        "draft_vocab_size",
        "mask_token_id",
        "sample_from_anchor",
        "dspark_bonus_anchor",
        "dflash_config",
    )
    names += ("norm_before_residual", "norm_output", "markov_rank", "block_size", "rope_parameters")
    REPORT["config"] = {name: getattr(hf, name, None) for name in names}
    REPORT["aux"] = aux_layers(VLLM.speculative_config)
    return dict(REPORT)


def classes():
    """vLLM's model of each architecture, as in its registry."""
    registry = (FILES / "vllm/model_executor/models/registry.py").read_text()
    wanted = ("Qwen3DSparkModel", "DFlashDraftModel", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM")
    found = {}
    for name in (*wanted, "LlamaForCausalLMEagle3", "EagleLlamaForCausalLM"):
        module, cls = registry.split(f'"{name}": (')[1].split(")")[0].replace('"', "").split(", ")
        imported = importlib.import_module(f"vllm.model_executor.models.{module.strip()}")
        imported.AutoWeightsLoader = Loader
        imported.process_eagle_weight = lambda model, name: REPORT["own"].append(name)
        imported.get_draft_quant_config = lambda config: None
        found[name] = getattr(imported, cls.strip(", "))
    found["LlamaForCausalLM"] = found["EagleLlamaForCausalLM"]  # configs/eagle.py puts the word in front
    return found


FILES = Path(sys.argv[1])
if __name__ == "__main__":
    sys.meta_path.insert(0, Finder(FILES))
    CLASSES = classes()
    print(json.dumps([read(Path(folder)) for folder in sys.argv[3:]]))
