"""Run by test_ranks.py under mpirun: one tail, MPI processes as ranks."""

import sys

from mpi4py import MPI

import latent_moe as lm
from problem import TOLERANCE, Problem, relative_error

problem = Problem()
if sys.argv[1] == "all_gather":
    sys.modules["latent_moe._mpi"] = None  # as in a package that was built without MPI
bootstrap = lm.mpi_ranks(MPI.COMM_WORLD)
context = problem.context(bootstrap)
refused = {each.tail: each.reason for each in context.plan(5).refused}
# mpi4py asks for MPI_THREAD_MULTIPLE, so MPI's own transport can run two collectives at once; an all-gather cannot.
assert ("overlap" in refused) == (sys.argv[1] == "all_gather"), refused
out = context.layers[0].run(problem.routed[bootstrap.rank], problem.shared[bootstrap.rank], problem.prefix)
assert relative_error(out, problem.reference()) < TOLERANCE["bf16"]
parts = bootstrap.all_gather(out.tobytes())
assert parts[0] == parts[1]
del context, bootstrap
print(f"right, {sys.argv[1]}", flush=True)
