"""The tail of latent mixture-of-experts layers under tensor parallelism.

    out = prefix + Σ_ranks shared + s · RMSNorm(Σ_ranks routed) · W_upᵀ        on every rank

    import latent_moe as lm

    def rank_body(bootstrap):
        context = lm.Context(lm.Shape.preset("kimi-k3"), bootstrap)
        layer = context.add_layer(7, w_up, gamma)
        context.seal()
        return layer.run(routed, shared, prefix)

    outs = lm.run_thread_ranks(2, rank_body)

Arrays are NumPy's, PyTorch's or anybody's who speaks DLPack. See `docs/guides/python.md`.
"""

from latent_moe._core import Bootstrap, single_rank, thread_ranks
from latent_moe._core import version as __version__
from latent_moe.context import (
    Candidate,
    Context,
    Counters,
    DeferredRows,
    Fault,
    Half,
    Layer,
    Options,
    Plan,
    Refusal,
    Shape,
    TokenRange,
    explain,
)
from latent_moe.errors import LatentMoeError
from latent_moe.ranks import all_gather_ranks, mpi_ranks, run_thread_ranks

__all__ = [
    "Bootstrap",
    "Candidate",
    "Context",
    "Counters",
    "DeferredRows",
    "Fault",
    "Half",
    "LatentMoeError",
    "Layer",
    "Options",
    "Plan",
    "Refusal",
    "Shape",
    "TokenRange",
    "__version__",
    "all_gather_ranks",
    "explain",
    "mpi_ranks",
    "run_thread_ranks",
    "single_rank",
    "thread_ranks",
]
