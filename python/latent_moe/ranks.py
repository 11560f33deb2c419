"""How the ranks of a context find each other: threads, MPI processes, or any all-gather of bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from latent_moe._core import Bootstrap, callable_ranks, thread_ranks
from latent_moe.errors import LatentMoeError

Result = TypeVar("Result")


def run_thread_ranks(world: int, body: Callable[[Bootstrap], Result], timeout_ms: int = 30_000) -> list[Result]:
    """Runs `body` on `world` threads and returns what they returned, in rank order.

    If ranks raise, the error of the lowest rank is raised whose error is not the echo of another's.
    """
    results: list[Any] = [None] * world
    failures: list[BaseException | None] = [None] * world

    def run(rank: int, bootstrap: Bootstrap) -> None:
        try:
            results[rank] = body(bootstrap)
        except BaseException as failure:
            failures[rank] = failure

    threads = [
        threading.Thread(target=run, args=(rank, bootstrap), name=f"latent-moe rank {rank}")
        for rank, bootstrap in enumerate(thread_ranks(world, timeout_ms))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raised = [failure for failure in failures if failure is not None]
    echoes = ("timeout", "aborted")
    own = [each for each in raised if not (isinstance(each, LatentMoeError) and each.code in echoes)]
    if raised:
        raise (own or raised)[0]
    return results


def all_gather_ranks(
    rank: int, world: int, all_gather: Callable[[bytes], Sequence[bytes]], local_world: int | None = None
) -> Bootstrap:
    """Ranks that `all_gather` brings together: given this rank's bytes it returns a list of the bytes of all ranks, in
    rank order, one `bytes` a rank.

    On a GPU it is used only while a context is created, sealed, suspended or resumed. On the CPU it also carries the tails'
    data, everything to everyone: right, but slow. `local_world` ranks run on this machine (all of them, if not given).
    """
    return callable_ranks(rank, world, all_gather, world if local_world is None else local_world)


def mpi_ranks(communicator: Any, timeout_ms: int = 30_000) -> Bootstrap:
    """The ranks of an mpi4py communicator. Collective over it; it is duplicated.

    Through MPI itself where this package was built with the MPI that mpi4py uses; otherwise through the communicator's
    `allgather`, without deadlines of its own.
    """
    from mpi4py import MPI

    try:
        from latent_moe import _mpi
    except ImportError:
        _mpi = None
    if _mpi is not None and _mpi.library_version() == MPI.Get_library_version():
        return _mpi.mpi_ranks(MPI._addressof(communicator), timeout_ms)
    duplicate = communicator.Dup()
    local = duplicate.Split_type(MPI.COMM_TYPE_SHARED)
    return all_gather_ranks(duplicate.Get_rank(), duplicate.Get_size(), duplicate.allgather, local.Get_size())
