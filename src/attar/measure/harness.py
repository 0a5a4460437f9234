"""Models of attar in lm-evaluation-harness (extra ``tasks``), under the name ``attar``:

    python -m attar.measure.harness --model attar --model_args pretrained=out/w4 --tasks arc_easy

is ``lm_eval`` with that model registered: releases up to 0.4.13 find no model outside their own package. In
Python, importing this module is enough: ``lm_eval.simple_evaluate(model="attar", ...)``.

Arguments: pretrained (as MODEL of ``attar evaluate``), runner, dtype, device, kv_dtype, activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attar.chat_template import apply_continued, apply_template
from attar.errors import MissingExtraError
from attar.measure.generation import decode_tokens, generate_greedily, serving_llm
from attar.measure.multiple_choice import ScoredPair, log_likelihoods
from attar.measure.subject import load_subject
from attar.models.loading.plain_config import end_tokens
from attar.runtime.sampling.params import SamplingParams

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError:  # the module imports without the extra; using it raises MissingExtraError
    TemplateLM = object

    def register_model(name: str) -> Any:
        """Register nothing."""
        return lambda model: model


MAX_TOKENS = 256  # of a completion, unless the task sets a limit
CONTEXT = 2048  # of a model whose config has none


def check_extra() -> None:
    """Raise MissingExtraError unless lm_eval is installed."""
    if TemplateLM is object:
        raise MissingExtraError("lm_eval", "tasks")


@register_model("attar")
class Harness(TemplateLM):  # type: ignore[misc]
    """The harness's interface: log-likelihoods of continuations and of texts, and completions.

    Args:
        pretrained: a folder, a ``.gguf`` file, a hub id or attar:tiny.
        runner, dtype, device, kv_dtype, activations: as in ``attar evaluate``.
        batch_size, max_batch_size: ignored; the runtime forms its own batches.
    """

    def __init__(
        self,
        pretrained: str,
        runner: str = "auto",
        dtype: str = "auto",
        device: str = "cpu",
        kv_dtype: str = "auto",
        activations: int | str = "auto",
        batch_size: Any = None,
        max_batch_size: Any = None,
    ) -> None:
        check_extra()
        super().__init__()
        formats: dict[str, Any] = {"runner": runner, "kv_dtype": kv_dtype, "activations": activations}
        self.subject = load_subject(pretrained, dtype=dtype, device=device or "cpu", **formats)
        self.tokenizer = self.subject.tokenizer
        self.max_length = self.subject.context or CONTEXT

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The first token of a text without context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """Key of the harness's request cache."""
        return self.subject.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, with the tokenizer's special tokens unless the text begins with one."""
        bos_id = self.tokenizer.bos_token_id
        bos = None if bos_id is None else self.tokenizer.convert_ids_to_tokens(bos_id)
        has_bos = bos is not None and string.startswith(bos)
        special = not has_bos if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer(string, add_special_tokens=special, verbose=False)["input_ids"])

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation in the chat template; its end goes on without ``add_generation_prompt``."""
        if add_generation_prompt:
            return apply_template(self.tokenizer, chat_history, add_generation_prompt=True)
        return apply_continued(self.tokenizer, chat_history)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        results = log_likelihoods(self.subject, [(context, after) for _, context, after in requests])
        for (request, _context, _after), answer in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", request, answer)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """ln p of each text, in windows of the context whose scored tokens do not overlap."""
        windows: list[list[ScoredPair]] = [self._windows(request.args[0]) for request in requests]
        scores = iter(log_likelihoods(self.subject, [pair for pairs in windows for pair in pairs]))
        results = [sum(next(scores)[0] for _ in pairs) for pairs in windows]
        for request, answer in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return results

    def _windows(self, text: str) -> list[ScoredPair]:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [make_disjoint_window(window) for window in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """A completion of each context, cut before the first stop string."""
        results: list[str] = []
        for request in requests:
            context, options = request.args
            text = self._complete(self.tok_encode(context), dict(options))
            results.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        return results

    def _complete(self, prompt: list[int], options: dict[str, Any]) -> str:
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else [stop for stop in stops if stop]
        max_tokens = min(int(options.get("max_gen_toks", MAX_TOKENS)), self.max_length - 1)
        prompt = prompt[-(self.max_length - max_tokens) :]  # a long prompt loses its beginning
        if self.subject.loaded is None:
            ids = generate_greedily(self.subject, prompt, max_tokens)
            model = self.subject.model
            ends = end_tokens(model.generation_config, model.config, self.subject.tokenizer)
            text = decode_tokens(self.subject, [token for token in ids if token not in ends])
        else:
            text = serving_llm(self.subject).generate(prompt, _params(options, max_tokens, stops))[0].text
        for stop in stops:
            text = text.split(stop)[0]
        return text


def _params(options: dict[str, Any], max_tokens: int, stops: list[str]) -> SamplingParams:
    """Sampling parameters of a task; greedy by default."""
    sampled = bool(options.get("do_sample", float(options.get("temperature", 0.0)) > 0))
    return SamplingParams(
        temperature=float(options.get("temperature", 1.0)) if sampled else 0.0,
        top_p=float(options.get("top_p", 1.0)) if sampled else 1.0,
        max_tokens=max_tokens,
        stop=tuple(stops),
    )


if __name__ == "__main__":
    check_extra()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
