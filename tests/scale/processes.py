"""Processes that stand for a fleet: each runs a function with torchrun's environment, gloo on loopback."""

import os
import socket

import torch
from torch import multiprocessing

LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def run_ranks(function, count, *arguments):
    """Call ``function(*arguments)`` in ``count`` processes; raises what one of them raises."""
    port = str(free_port())
    multiprocessing.start_processes(_start, (function, count, port, arguments), count, start_method="spawn")


def _start(rank, function, count, port, arguments):
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(LOOPBACK, MASTER_PORT=port)
    torch.set_num_threads(1)
    function(*arguments)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
