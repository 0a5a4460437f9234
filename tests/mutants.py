"""Small breaks of the code, each with the test that must turn red: ``make mutants``, or

    python -m tests.mutants [--jobs 2] [--only gguf] [--minutes 30]

A break is applied in a copy of the tree, alone, and its test runs in a process of its own with one thread. A
survivor is a break that no test sees; a stale row is one whose old text is not in its file exactly once.
``tests/test_mutants.py`` looks at the table without running it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "benchmarks", "scripts", "docs", "recipes", "pyproject.toml", "README.md")
SECONDS = 240.0  # that one test may take; a test that hangs has seen the break
NONE_CHOSEN = 5  # what pytest ends with


@dataclass(frozen=True)
class Mutant:
    """A break: ``old`` becomes ``new`` in a file, and a test must fail.

    Attributes:
        file: below ``src/attar``.
        test: a file below ``tests``, or one test of it: ``file::name``.
    """

    file: str
    old: str
    new: str
    test: str


def stale(mutant: Mutant, root: Path = ROOT) -> str:
    """Why a row cannot be run; empty where it can."""
    source = root / "src" / "attar" / mutant.file
    file, _, name = mutant.test.partition("::")
    test = root / "tests" / file
    if not source.is_file() or (count := source.read_text().count(mutant.old)) != 1:
        return f"{mutant.file}: {count if source.is_file() else 'no file'} times: {mutant.old!r}"
    if mutant.new == mutant.old:
        return f"{mutant.file}: nothing changes"
    if not test.is_file() or (name and f"def {name.partition('[')[0]}(" not in test.read_text()):
        return f"no test {mutant.test}"
    return ""


def survives(mutant: Mutant, tree: Path) -> bool:
    """Whether the test still passes in the tree with the break, which is taken back: its fast cases, and
    where they pass its slow ones."""
    source = tree / "src" / "attar" / mutant.file
    text = source.read_text()
    source.write_text(text.replace(mutant.old, mutant.new))
    environment = os.environ | {
        "PYTHONPATH": f"{tree / 'src'}:{tree}",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider"]
    command += [str(tree / "tests" / mutant.test), "-m"]
    passed = False
    try:
        for kind in ("not slow and not peers", "slow and not peers"):
            ended = subprocess.run(
                [*command, kind], cwd=tree, env=environment, capture_output=True, timeout=SECONDS
            )
            if ended.returncode == 1:
                return False
            if ended.returncode not in (0, NONE_CHOSEN):
                break
            passed |= ended.returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        source.write_text(text)
    if ended.returncode not in (0, NONE_CHOSEN) or not passed:
        raise SystemExit(f"{mutant.test} did not run:\n{ended.stdout.decode()[-2000:]}")
    return True


def copy_tree(to: Path) -> Path:
    """The parts of the tree that tests need, in a folder of their own."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.is_file():
            shutil.copy(source, to / name)
    return to


def run(mutants: list[Mutant], jobs: int, minutes: float) -> int:
    """Run the breaks; prints a line for each that survives, is stale or was not reached. How many there
    are."""
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        trees: Queue[Path] = Queue()
        for number in range(jobs):
            trees.put(copy_tree(Path(folder) / str(number)))

        def verdict(mutant: Mutant) -> str:
            if time.monotonic() > end:
                return "not reached"
            tree = trees.get()
            try:
                why = stale(mutant, tree)
                return f"stale: {why}" if why else "survives" if survives(mutant, tree) else ""
            finally:
                trees.put(tree)

        left = 0
        for number, (mutant, said) in enumerate(zip(mutants, pool.map(verdict, mutants), strict=True), 1):
            left += bool(said)
            label = f"{mutant.file}: {mutant.old.strip()!r} -> {mutant.new.strip()!r} ({mutant.test})"
            print(f"[{number}/{len(mutants)}] {said or 'killed'}: {label}", flush=True)
    print(f"{left} of {len(mutants)} breaks are not seen")
    return left


def main() -> None:
    """Run the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--only", default="", help="rows whose file or test has this text")
    parser.add_argument("--minutes", type=float, default=30.0, help="no break is begun after these")
    args = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if args.only in mutant.file + " " + mutant.test]
    raise SystemExit(1 if run(chosen, args.jobs, args.minutes) else 0)


M = Mutant
MUTANTS = (
    # quantization
    M(
        "quantization/hessian.py",
        "    return energies.where(seen, usual)",
        "    return energies",
        "quantization/test_odd_weights.py",
    ),
    M(
        "quantization/hessian.py",
        "energies[seen].median()",
        "energies[seen].max()",
        "quantization/test_odd_weights.py",
    ),
    M(
        "quantization/hessian.py",
        "        C.diagonal().add_(informed(diagonal) - diagonal)\n",
        "",
        "quantization/test_odd_weights.py",
    ),
    M(
        "quantization/hessian.py",
        "    return not values.numel() or bool(",
        "    return bool(",
        "quantization/test_odd_weights.py",
    ),
    M(
        "quantization/hessian.py",
        "        used = max(used * 10.0, 1e-4)",
        "        used = 2.0",
        "quantization/methods/test_gptq.py",
    ),
    M(
        "quantization/columns.py",
        "torch.mul(column - grid.decode(codes[i], at), step, out=errors[i])",
        "torch.mul(target - grid.decode(codes[i], at), step, out=errors[i])",
        "kernels/test_columns_kernel.py::test_gptq_and_refinement_are_those_of_torch",
    ),
    M(
        "quantization/columns.py",
        "alpha=-1.0)\n        block.copy_(codes)",
        "alpha=-0.9)\n        block.copy_(codes)",
        "quantization/methods/test_gptq.py",
    ),
    M(
        "quantization/methods/gptaq.py",
        "P = alpha * (change",
        "P = -alpha * (change",
        "quantization/methods/test_gptaq.py",
    ),
    M(
        "quantization/methods/qronos.py",
        "first = W[:, order[0]] + missing",
        "first = W[:, order[0]] - missing",
        "quantization/methods/test_qronos.py",
    ),
    M(
        "quantization/methods/yaqa.py",
        "    fill_unseen_(H_O)\n",
        "    H_O.diagonal().add_(1e-3)\n",
        "quantization/methods/test_yaqa.py",
    ),
    M(
        "quantization/methods/refine.py",
        "< 0\n    kept = torch.where(better",
        "< 1\n    kept = torch.where(better",
        "quantization/methods/test_refine.py",
    ),
    M(
        "quantization/methods/refine.py",
        "wanted = current[i] - slope * step",
        "wanted = current[i] + slope * step",
        "quantization/methods/test_refine.py",
    ),
    M(
        "quantization/grids/integer.py",
        "* shrink * 2.0 / steps",
        "* shrink / steps",
        "quantization/grids/test_integer.py",
    ),
    M(
        "quantization/grids/fp4.py",
        "torch.where(top > 0, E4M3_SMALLEST, 0.125)",
        "torch.where(top > 0, 0.125, 0.125)",
        "quantization/test_odd_weights.py",
    ),
    M(
        "quantization/grids/ggml_search.py",
        "for ratio in [*ratios, 1.0 / d]:",
        "for ratio in ratios:",
        "quantization/test_odd_weights.py",
    ),
    M(
        "quantization/grids/ggml.py",
        "middles, right=True)",
        "middles, right=False)",
        "quantization/grids/test_ggml.py",
    ),
    M(
        "kernels/csrc/columns.cpp",
        "result = y >= 0.5f",
        "result = y > 0.5f",
        "kernels/test_columns_kernel.py::test_exact_ties_go_where_torch_takes_them",
    ),
    M(
        "walks/positions.py",
        "importance[:, :FIRST] = self.first",
        "importance[:, 1:FIRST] = self.first",
        "walks/test_sweep.py",
    ),
    M(
        "walks/positions.py",
        "larger <= ALIKE * smaller",
        "larger <= 99 * smaller",
        "walks/test_sweep.py",
    ),
    M(
        "sensitivity/positions.py",
        "part.mean().expand(len(part))",
        "part[:1].expand(len(part))",
        "sensitivity/test_positions.py",
    ),
    M(
        "quantization/methods/tune.py",
        "factor.clamp(min=SMALLEST)\n            numbers",
        "factor.clamp(min=1.0)\n            numbers",
        "quantization/methods/test_tune.py::test_the_numbers_of_a_block_learn_and_its_codes_stay",
    ),
    M(
        "quantization/tuning.py",
        "packed[read:] if",
        "packed[1:] if",
        "quantization/test_tuning.py",
    ),
    M(
        "quantization/methods/refine_kronecker.py",
        "gradient.addmm_(H[:, at], moved)",
        "gradient.addmm_(H[:, at], moved, alpha=0.9)",
        "quantization/methods/test_refine_kronecker.py",
    ),
    M(
        "quantization/settings.py",
        "if bits <= AUTO_BITS and",
        "if bits < AUTO_BITS and",
        "quantization/test_effort.py",
    ),
    M(
        "quantization/layerwise.py",
        '"unseen": statistics.unseen,',
        '"unseen": 0,',
        "quantization/test_odd_weights.py",
    ),
    M(
        "quantization/transforms/awq.py",
        "return informed(self.sum / max(self.hessian.weight, 1e-30))",
        "return self.sum / max(self.hessian.weight, 1e-30)",
        "quantization/test_odd_weights.py",
    ),
    M(
        "quantization/transforms/smoothquant.py",
        "share(informed(x.float()))",
        "share(x.float())",
        "quantization/test_odd_weights.py",
    ),
    M(
        "quantization/calibration.py",
        "return float(top / (high - low)) or 1.0",
        "return float(top / (high - low))",
        "quantization/test_calibration.py",
    ),
    M(
        "quantization/gates.py",
        'GateViolation(name, "codes", "error" if used < USED_ERROR',
        'GateViolation(name, "codes", "warning" if used < USED_ERROR',
        "quantization/test_gates.py",
    ),
    M(
        "quantization/gates.py",
        "return len(sample) >= 8 and",
        "return len(sample) >= 80 and",
        "quantization/test_gates.py",
    ),
    M(
        "quantization/gates.py",
        "severe = kl >= blind",
        "severe = kl >= 9 * blind",
        "quantization/test_gates.py",
    ),
    # pruning
    M(
        "pruning/criteria/wanda.py",
        "return informed(norms)",
        "return norms",
        "quantization/test_odd_weights.py",
    ),
    M(
        "pruning/criteria/wanda.py",
        "weight.float().abs() * norms",
        "weight.float().abs() + norms",
        "pruning/criteria/test_wanda.py",
    ),
    M(
        "pruning/criteria/owl.py",
        "tilt = reach * (1.0 - 2.0",
        "tilt = -reach * (1.0 - 2.0",
        "pruning/criteria/test_owl.py",
    ),
    M(
        "pruning/reconstruction/linear.py",
        "mask = torch.nn.functional.pad(mask, (0, 1), value=True)",
        "mask = torch.nn.functional.pad(mask, (0, 1), value=False)",
        "pruning/reconstruction/test_linear.py",
    ),
    M(
        "pruning/reconstruction/linear.py",
        "        H, C = H + fill, C + fill\n",
        "        H = H + fill\n",
        "pruning/reconstruction/test_linear.py",
    ),
    M(
        "pruning/reconstruction/linear.py",
        "    if not bool(stays.any()):  # a Linear that is zero\n        return solved\n",
        "",
        "quantization/test_odd_weights.py",
    ),
    M(
        "pruning/solvers/alps.py",
        "V = wanted.sub_(D).mul_(rho)",
        "V = wanted.sub_(D)",
        "pruning/solvers/test_alps.py",
    ),
    M(
        "pruning/solvers/least_squares.py",
        "R.addcmul_(product, step, value=-1.0)",
        "R.addcmul_(product, step, value=1.0)",
        "pruning/solvers/test_least_squares.py",
    ),
    M(
        "pruning/units.py",
        "torch.stack(sizes).amin(0) > 0",
        "torch.stack(sizes).amax(0) > 0",
        "pruning/test_units.py::test_units_that_the_text_never_switched_on_are_usual_ones_and_zero_ones_go_first",
    ),
    M(
        "sparsity.py",
        "zeros * (row + 1) // count - zeros * row // count > zeros // count",
        "False",
        "test_sparsity.py",
    ),
    # walks
    M(
        "walks/block_runner.py",
        "with reduced_products(self.state.fast):",
        "with reduced_products():",
        "walks/test_sweep.py::test_statistics_are_summed_in_the_precision_of_the_sweep",
    ),
    M(
        "walks/distributed.py",
        "parameter.grad.div_(count())",
        "parameter.grad.div_(1)",
        "walks/test_gradients.py",
    ),
    M("walks/distributed.py", "distributed.all_reduce(used)", "pass", "walks/test_gradients.py"),
    # sampling and verification
    M("runtime/sampling/warp.py", "if sums[-1] >= mass:", "if True:", "runtime/sampling/test_warp.py"),
    M("runtime/sampling/warp.py", "(sums - values < mass)", "(sums < mass)", "runtime/sampling/test_warp.py"),
    M(
        "runtime/sampling/warp.py",
        "np.partition(near, len(near) - k)[len(near) - k]",
        "np.partition(near, len(near) - k)[len(near) - k - 1]",
        "runtime/sampling/test_warp.py",
    ),
    M(
        "runtime/sampling/penalties.py",
        "torch.where(values > 0, values / r, values * r)",
        "values / r",
        "runtime/sampling/test_penalties.py",
    ),
    M(
        "runtime/sampling/penalties.py",
        "params.frequency_penalty * c + params.presence_penalty",
        "params.frequency_penalty + params.presence_penalty",
        "runtime/sampling/test_penalties.py",
    ),
    M(
        "runtime/sampling/penalties.py",
        "logits.masked_fill_(~allowed",
        "logits.masked_fill_(allowed",
        "runtime/sampling/test_warp.py",
    ),
    M(
        "runtime/speculate/verify.py",
        'if draft.rule == "iid" and draft.is_chain:',
        "if False:",
        "runtime/speculate/test_verify.py",
    ),
    M(
        "runtime/speculate/verify.py",
        "path.append(node)",
        "path.append(node + 1)",
        "runtime/speculate/test_verify.py",
    ),
    # formats of layers
    M(
        "quantization/kv_bits.py",
        "losses[layer] += token_kl(reference, rounded)",
        "losses[layer] += token_kl(rounded, reference)",
        "quantization/test_kv_bits.py",
    ),
    M(
        "kernels/decode.py",
        "self._padded[1][layer].data_ptr()",
        "self._padded[1][0].data_ptr()",
        "quantization/test_kv_bits.py",
    ),
    M(
        "runtime/kv/store/rotated.py",
        "self.basis.at(*owner)",
        "self.basis.at(0, 0)",
        "runtime/kv/store/test_rotated.py",
    ),
    # scheduler and blocks
    M(
        "runtime/kv/block_manager.py",
        "self._blocks.count(table.blocks[tail]) > 1",
        "False",
        "runtime/kv/test_block_manager.py",
    ),
    M(
        "runtime/kv/block_manager.py",
        "min(most_cached, len(tokens) - 1)",
        "most_cached",
        "runtime/kv/test_block_manager.py",
    ),
    M(
        "runtime/kv/block_manager.py",
        "if needed + spare > self.free + self.cached:",
        "if needed > self.free + self.cached:",
        "runtime/kv/test_block_manager.py",
    ),
    M(
        "runtime/kv/block_manager.py",
        "self._tree.match(tokens[:end], salt)",
        'self._tree.match(tokens[:end], "")',
        "runtime/kv/test_block_manager.py",
    ),
    M(
        "runtime/kv/block_manager.py",
        "certain - self.window",
        "certain - self.window + 1",
        "runtime/kv/test_block_manager.py",
    ),
    M(
        "runtime/scheduler.py",
        "sequence.cut_drafts(sequence.limit - len(sequence.tokens) - 1)",
        "sequence.cut_drafts(sequence.limit - len(sequence.tokens) + 9)",
        "runtime/test_scheduler.py",
    ),
    M("runtime/scheduler.py", "            del self._live[sequence.id]\n", "", "runtime/test_scheduler.py"),
    # checkpoints
    M(
        "checkpoint/atomic.py",
        "fsync_tree(partial) if partial.is_dir() else fsync(partial)\n    partial.replace(final)",
        "partial.replace(final)",
        "checkpoint/test_atomic.py",
    ),
    # measuring
    M(
        "measure/metrics.py",
        "masked_fill_(weight == 0, 0.0)",
        "masked_fill_(weight == 0, 1.0)",
        "measure/test_metrics.py",
    ),
    M(
        "measure/comparison.py",
        "ours_only = [row.right & ~row.reference_right",
        "ours_only = [row.right & row.reference_right",
        "measure/test_comparison.py",
    ),
    M(
        "measure/uncertainty.py",
        "[(row - everything.mean()).sum() for row in rows]",
        "[row.sum() for row in rows]",
        "measure/test_comparison.py",
    ),
    M("measure/noise.py", "function(*map(_rounded, args)", "function(*args", "measure/test_noise.py"),
    M(
        "measure/run_folder.py",
        "max(floor, NORMAL_95 * self",
        "max(0.0, NORMAL_95 * self",
        "measure/test_verdict_and_table.py",
    ),
    M(
        "measure/run_folder.py",
        "if texts[0] == texts[1] and",
        "if",
        "measure/test_verdict_and_table.py",
    ),
    M("measure/sweep.py", "apart and quality < best[1]", "quality < best[1]", "recipe/test_sweep.py"),
    M(
        "measure/multiple_choice.py",
        "changes.count(-1.0)",
        "changes.count(1.0)",
        "measure/test_multiple_choice.py",
    ),
    M("measure/generation.py", "tokens[: end + 1]", "tokens", "measure/test_generation.py"),
    M("measure/metrics.py", "/ P + Q.log() - P.log()", "/ P + P.log() - Q.log()", "measure/test_metrics.py"),
    M(
        "measure/metrics.py",
        "rows.logsumexp(-1) - chosen",
        "chosen - rows.logsumexp(-1)",
        "measure/test_metrics.py",
    ),
    # merging
    M(
        "merging/methods/ties.py",
        "chunk.abs() >= threshold",
        "chunk.abs() > threshold",
        "merging/methods/test_task_vectors.py",
    ),
    M(
        "merging/methods/ties.py",
        "1.0 if self.balance >= 0 else -1.0",
        "1.0",
        "merging/methods/test_task_vectors.py",
    ),
    M(
        "merging/methods/slerp.py",
        "cosine.abs() > NEARLY_PARALLEL",
        "cosine > NEARLY_PARALLEL",
        "merging/methods/test_spheres.py",
    ),
    M(
        "merging/methods/slerp.py",
        "(a.float() * s0).add_(b.float() * s1)",
        "(a.float() * s1).add_(b.float() * s0)",
        "merging/methods/test_spheres.py",
    ),
    # distillation
    M(
        "distillation/objectives/forward_kl.py",
        "return values.clamp_(min=0.0).mul_(T * T), z",
        "return values.clamp_(min=0.0).mul_(T), z",
        "distillation/objectives/test_forward_kl.py",
    ),
    M(
        "distillation/objectives/forward_kl.py",
        "z.scatter_add_(1, tokens, -weights)",
        "z.scatter_add_(1, tokens, weights)",
        "distillation/objectives/test_forward_kl.py",
    ),
    M(
        "distillation/objectives/reverse_kl.py",
        "d.sub_(values[:, None]).mul_(q)",
        "d.mul_(q)",
        "distillation/objectives/test_contract.py",
    ),
    M(
        "distillation/objectives/jsd.py",
        "if beta <= 0.5:",
        "if True:",
        "distillation/objectives/test_contract.py",
    ),
    M(
        "distillation/objectives/jsd.py",
        "alpha=1.0 / beta)",
        "alpha=beta)",
        "distillation/objectives/test_contract.py",
    ),
    # GGUF
    M(
        "deployment/importance.py",
        "return informed(means)",
        "return means",
        "deployment/test_gguf_export.py::test_an_input_that_was_never_seen_counts_as_a_usual_one",
    ),
    M(
        "deployment/importance.py",
        "if not bool((counts > 0).any()):",
        "if entry is None:",
        "deployment/test_gguf_export.py::test_what_an_importance_matrix_lacks_is_said",
    ),
    M(
        "deployment/gguf_codes.py",
        "            check_range(str(placement.stored), weight, quantized)\n",
        "",
        "deployment/test_gguf_export.py::test_weights_that_float16_scales_cannot_hold_are_refused",
    ),
    M(
        "deployment/gguf_type_search.py",
        "return -(-count // ALIGNMENT) * ALIGNMENT",
        "return count",
        "deployment/test_gguf_type_search.py",
    ),
    M(
        "deployment/gguf_type_search.py",
        "        if math.isfinite(sensitivity.kl):\n",
        "        if True:\n",
        "deployment/test_gguf_type_search.py",
    ),
    M(
        "formats/gguf/codes.py",
        "(zero >= 0) & (zero < levels)",
        "(zero >= 0)",
        "formats/gguf/test_gguf_codes.py",
    ),
    M(
        "formats/gguf/codes.py",
        "return (coded.codes.to(torch.int16) - low)",
        "return (coded.codes.to(torch.int16) + low)",
        "formats/gguf/test_gguf_codes.py",
    ),
    M("formats/gguf/imatrix.py", "(entry.in_sum2 < 0).any()", "False", "formats/gguf/test_imatrix.py"),
    M("formats/gguf/imatrix.py", "float(max(calls, 1))", "float(calls)", "formats/gguf/test_imatrix.py"),
    # services: the tenant at every hop, bounds of messages
    M(
        "serving/services/draft_service.py",
        "most, session.salt, None if",
        'most, "", None if',
        "serving/services/test_coordinator.py::test_every_message_of_a_request_carries_its_tenant",
    ),
    M(
        "serving/services/offer_proposer.py",
        "len(tokens), request.salt[:256], rules",
        'len(tokens), "", rules',
        "serving/services/test_coordinator.py::test_every_message_of_a_request_carries_its_tenant",
    ),
    M(
        "serving/services/target_client.py",
        "deadline_s, salt[:256], traceparent)",
        'deadline_s, "", traceparent)',
        "serving/services/test_coordinator.py::test_every_message_of_a_request_carries_its_tenant",
    ),
    M(
        "serving/services/target_service.py",
        '"salt": message.salt}',
        '"salt": ""}',
        "serving/services/test_coordinator.py::test_every_message_of_a_request_carries_its_tenant",
    ),
    M(
        "serving/services/draft_service.py",
        "max(tokens, default=0) < self.vocabulary and",
        "",
        "serving/services/test_draft_service.py",
    ),
    M(
        "serving/services/draft_service.py",
        " and held + len(tokens) <= self.most_tokens",
        "",
        "serving/services/test_draft_service.py",
    ),
    # what is on the disk before it has its name
    M(
        "checkpoint/atomic.py",
        "    partial.replace(final)\n    fsync(final.parent)",
        "    partial.replace(final)",
        "checkpoint/test_atomic.py",
    ),
    M(
        "checkpoint/atomic.py",
        "            fsync(Path(parent, name))\n",
        "            pass\n",
        "checkpoint/test_atomic.py",
    ),
    M(
        "cluster/journal.py",
        "            os.fsync(self._descriptor)\n",
        "            pass\n",
        "cluster/test_tasks.py",
    ),
    M(
        "checkpoint/remote.py",
        "            os.fsync(file.fileno())\n",
        "            pass\n",
        "checkpoint/test_remote.py",
    ),
    M(
        "formats/gguf/writer.py",
        "                atomic.fsync(part.partial)\n",
        "                pass\n",
        "formats/gguf/test_gguf_container.py",
    ),
    M(
        "collection/journal.py",
        "                os.fsync(self._descriptor)\n",
        "                pass\n",
        "collection/test_journal.py",
    ),
)
"""Spread over the tree; a break that survived once gets a test first, and then a row."""

if __name__ == "__main__":
    main()
