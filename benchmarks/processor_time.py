"""Timings of a busy machine: with ``--processor-time`` seconds are those in which this thread computed.

Imported before attar, whose clocks are ``time.perf_counter``. It is right for one thread alone, and for what
does not wait: ``--threads 1``. What other processes take from caches and memory still counts.
"""

from __future__ import annotations

import argparse
import sys
import time

FLAG = "--processor-time"

if FLAG in sys.argv:
    time.perf_counter = time.thread_time  # type: ignore[assignment]


def add_flag(parser: argparse.ArgumentParser) -> None:
    """The flag, for the help."""
    parser.add_argument(FLAG, action="store_true", help="seconds of the processor; needs --threads 1")


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse several threads: theirs would not be counted."""
    if args.processor_time and args.threads != 1:
        parser.error(f"{FLAG} counts one thread: --threads is {args.threads}, and must be 1")
