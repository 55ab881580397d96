"""Run a function on real gloo process groups: one process a rank on 127.0.0.1, with a hard time limit."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def run_gloo(fn: Callable[..., T], n: int, *args: object, timeout: float = 60, dying: Collection[int] = ()) -> list[T]:
    """Call ``fn(*args)`` on each of ``n`` ranks and return what they return, by rank.

    ``fn``, its arguments and results must pickle, so ``fn`` is a function at the top of a module. The first rank that
    fails fails the run, with its traceback; no process outlives the call. The ``dying`` ranks do not live to return.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "shardwise"])  # imported once for all runs, before any thread is started
    port = free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(n)]
    ranks = [
        context.Process(target=_rank, args=(fn, rank, n, port, pipes[rank][1], args, not dying), daemon=True)
        for rank in range(n)
    ]
    try:
        for process, (_, sender) in zip(ranks, pipes, strict=True):
            process.start()
            sender.close()
        receivers = [receiver for rank, (receiver, _) in enumerate(pipes) if rank not in dying]
        return _collect(receivers, time.monotonic() + timeout)  # type: ignore[return-value]
    finally:
        _end(ranks)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(
    fn: Callable[..., object], rank: int, n: int, port: int, sender: Connection, args: tuple[object, ...], meet: bool
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(item) for name, item in place.items()}, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=n)
        reply = pickle.dumps((True, fn(*args)))  # by value: the sender of a shared tensor would have to outlive it
        if meet:
            dist.barrier()
    except BaseException:
        reply = pickle.dumps((False, f"rank {rank} of {n}:\n{traceback.format_exc()}"))
    sender.send_bytes(reply)
    sender.close()
    time.sleep(60)  # until it is ended: to exit now would reset connections that another rank may still read from


def _collect(receivers: list[Connection], deadline: float) -> list[object]:
    results: dict[int, object] = {}
    while len(results) < len(receivers):
        open_ones = [receiver for rank, receiver in enumerate(receivers) if rank not in results]
        ready = wait(open_ones, max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(receivers)) if rank not in results]
            raise TimeoutError(f"ranks {missing} of {len(receivers)} did not finish in time")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            results[receivers.index(receiver)] = _receive(receiver, receivers.index(receiver))
    return [results[rank] for rank in range(len(receivers))]


def _receive(receiver: Connection, rank: int) -> object:
    try:
        worked, result = pickle.loads(receiver.recv_bytes())
    except EOFError:
        raise AssertionError(f"rank {rank} died without a word") from None
    if not worked:
        raise AssertionError(result)
    return result


def _end(ranks: list[BaseProcess]) -> None:
    for process in ranks:
        if process.pid is not None:
            process.join(timeout=2 if process.exitcode is None and not process.is_alive() else 0.2)
            process.kill()
            process.join()
