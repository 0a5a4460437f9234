"""What the calibration text is worth: one model, one method, the texts that attar brings, KL on other texts.

    python benchmarks/calibration_text.py MODEL [--text whole:wikitext2-test.txt ...] [--samples 32]
        [--length 256] [--scheme W4A16] [--group-size 64] [--tokens 4096] [--sources python-docs ...]

A row a source: the model is quantized with GPTQ, calibrated on that source; ``nearest`` reads no text. A
column an evaluated text: mean KL to the original in nats a token, and top-1 agreement, on the same tokens for
all rows. A text that a calibration has read is marked. MODEL must be dense (attar export --format dense).

    python benchmarks/calibration_text.py MODEL --types Q4_K_M [--samples 8 32 128] [--text ...]
        [--sources nearest python-docs-chat ...] [--roundings nearest gptq qronos]

The same for types of GGUF, by the number of sequences read: nearest rounding with an importance matrix of
them (``nearest`` as a source: with none), or rounding with data. ``s`` is the whole export.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

from attar.data.auto import fitting
from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.measure.evaluate import measure_quality
from attar.measure.reference import Reference, make_reference, text_note
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import load_subject
from attar.quantization.settings import QuantizeSettings, quantize_settings
from attar.quantization.stage import quantize

SOURCES = ("python-stdlib", "python-docs", "python-docs-chat")
NEAREST = "nearest"


def main() -> None:
    """Print the table."""
    options = _options()
    (ggufs if options.types else integers)(options)


def integers(options: argparse.Namespace) -> None:
    """A row for each text, as soon as it is measured."""
    references = [make_reference(options.model, _evaluation(options, text)) for text in options.text]
    print(f"{options.model}: auto is {' because '.join(fitting(references[0].subject.checkpoint))}")
    titles = "".join(f" {Path(text).name[:24]:>26s}" for text in options.text)
    print(f"{'calibrated on':20s} {'s':>6s}{titles}")
    for source in (NEAREST, *options.sources):
        with tempfile.TemporaryDirectory() as work:
            start = time.monotonic()
            quantized = quantize(options.model, Path(work) / "out", _quantization(options, source))
            seconds = time.monotonic() - start
            cells = [_cell(quantized.path, reference) for reference in references]
        print(f"{source:20s} {seconds:6.0f}" + "".join(f" {cell:>26s}" for cell in cells), flush=True)


def ggufs(options: argparse.Namespace) -> None:
    """A row for each text, rounding and type, as soon as it is measured."""
    references = [make_reference(options.model, _evaluation(options, text)) for text in options.text]
    titles = "".join(f" {Path(text).name[:24]:>26s}" for text in options.text)
    print(f"{'text':20s} {'tokens':>8s} {'rounding':10s} {'type':8s} {'s':>6s}{titles}")
    for source, samples, rounding, kind in _exports(options):
        plain = source == NEAREST
        settings = ExportSettings(
            format="gguf",
            type=kind,
            rounding=rounding,
            imatrix="none" if plain else "compute" if rounding == NEAREST else "auto",
            data=SOURCES[0] if plain else source,
            samples=samples,
            sequence_length=options.length,
        )
        with tempfile.TemporaryDirectory() as work:
            file, start = Path(work) / "model.gguf", time.monotonic()
            export(options.model, file, settings)
            seconds = time.monotonic() - start
            cells = "".join(f" {_cell(file, reference):>26s}" for reference in references)
        read = 0 if plain else samples * options.length
        print(f"{Path(source).name:20s} {read:8d} {rounding:10s} {kind:8s} {seconds:6.1f}{cells}", flush=True)


def _exports(options: argparse.Namespace) -> list[tuple[str, int, str, str]]:
    """(text, sequences, rounding, type) of each row; without text once, and to nearest."""
    rows = product(options.sources, options.samples, options.roundings, options.types)
    first = options.samples[0], NEAREST
    return [row for row in rows if row[0] != NEAREST or row[1:3] == first]


def _cell(model: Path, reference: Reference) -> str:
    subject = load_subject(model)
    quality = measure_quality(subject, reference.settings, reference)
    note = text_note(subject, reference.settings, reference)
    return f"{quality.kl_mean:.5f} {quality.top1_agreement:6.2%}" + (" (read)" if note else "")


def _evaluation(options: argparse.Namespace, text: str) -> EvaluateSettings:
    return EvaluateSettings(data=text, tokens=options.tokens, sequence_length=options.length, batch_size=4)


def _quantization(options: argparse.Namespace, source: str) -> QuantizeSettings:
    nearest = source == NEAREST
    return quantize_settings(
        method="rtn" if nearest else "gptq",
        scheme=options.scheme,
        group_size=options.group_size,
        scales=options.scales,
        **({} if nearest else {"refine": options.refine}),
        samples=options.samples[0],
        sequence_length=options.length,
        data=SOURCES[0] if nearest else source,
        check_tokens=0,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=sys.modules[__name__].__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", nargs="+", default=["python-docs-chat"])
    parser.add_argument("--sources", nargs="*", default=list(SOURCES), help="nearest too with --types")
    parser.add_argument("--samples", type=int, nargs="+", default=[32], help="several with --types")
    parser.add_argument("--roundings", nargs="+", default=[NEAREST], help="with --types")
    parser.add_argument("--types", nargs="*", default=[], help="of GGUF, such as Q4_K_M")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--scheme", default="W4A16")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--scales", default="auto")
    parser.add_argument("--refine", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
