"""Ranks by an all-gather of the caller's, and by MPI."""

import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading

import pytest

import latent_moe as lm
from problem import TOLERANCE, Problem, relative_error, same_bits


class Table:
    """An all-gather among threads in plain Python."""

    def __init__(self, world):
        self.parts = [b""] * world
        self.barrier = threading.Barrier(world, timeout=20)

    def gather(self, rank):
        def all_gather(part):
            self.parts[rank] = part
            self.barrier.wait()
            parts = list(self.parts)
            self.barrier.wait()
            return parts

        return all_gather


def on_threads(world, body):
    results = [None] * world
    threads = [threading.Thread(target=lambda rank=rank: results.__setitem__(rank, body(rank))) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_any_python_all_gather_brings_ranks_together(world):
    problem = Problem(world=world)
    table = Table(world)

    def body(rank):
        bootstrap = lm.all_gather_ranks(rank, world, table.gather(rank))
        assert (bootstrap.rank, bootstrap.world, bootstrap.local_world) == (rank, world, world)
        context = problem.context(bootstrap)
        reasons = {each.tail: each.reason for each in context.plan(5).refused}
        assert "cannot run two collectives at once" in reasons["overlap"]
        return context.layers[0].run(problem.routed[rank], problem.shared[rank], problem.prefix)

    outs = on_threads(world, body)
    assert relative_error(outs[0], problem.reference()) < TOLERANCE["bf16"]
    assert all(same_bits(outs[0], out) for out in outs)


def network_is_down(part):
    raise OSError("the network is down")


@pytest.mark.parametrize(
    ("all_gather", "text"),
    [
        (network_is_down, "the all-gather callable failed: OSError: the network is down"),
        (lambda part: [part], "returned 1 parts, expected 2"),
        (lambda part: [part, part[:-1]], "is not the .* bytes that a rank sent"),
        (lambda part: [part, "text"], "is not the .* bytes that a rank sent"),
        (lambda part: None, "the all-gather callable failed: TypeError: .*has no len"),
    ],
)
def test_an_all_gather_that_fails_is_an_error_that_says_so(all_gather, text):
    with pytest.raises(lm.LatentMoeError, match=text) as caught:
        Problem().context(lm.all_gather_ranks(0, 2, all_gather))
    assert caught.value.code == "unavailable"


def test_an_interrupt_while_ranks_are_waited_for_stays_one():
    def interrupted(part):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Problem().context(lm.all_gather_ranks(0, 2, interrupted))

    alone = lm.thread_ranks(2, timeout_ms=1500)[0]  # the other one never comes
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        Problem().context(alone)


def test_bootstraps_gather_bytes():
    outs = lm.run_thread_ranks(3, lambda bootstrap: bootstrap.all_gather(b"rank%d" % bootstrap.rank))
    assert outs == [[b"rank0", b"rank1", b"rank2"]] * 3


def test_run_thread_ranks_refuses_a_world_that_is_none():
    with pytest.raises(lm.LatentMoeError, match="0"):
        lm.run_thread_ranks(0, lambda bootstrap: None)


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py")
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun")
@pytest.mark.parametrize("way", ["native", "all_gather"])
def test_mpi_processes_are_ranks(way):
    script = pathlib.Path(__file__).with_name("mpi_ranks_body.py")
    flags = ["--allow-run-as-root", "--oversubscribe", "--mca", "btl_vader_single_copy_mechanism", "none"]
    done = subprocess.run(
        ["mpirun", *flags, "-n", "2", sys.executable, str(script), way],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"right, {way}") == 2
