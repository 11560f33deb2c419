// Ranks that are MPI processes. Link `latent_moe::mpi`; the rest of the library does not need MPI.
#pragma once

#include <mpi.h>

#include "latent_moe/bootstrap.h"
#include "latent_moe/export.h"

namespace latent_moe {

/// Ranks are those of `communicator`, which is duplicated: the library's messages never meet the caller's. Collective over
/// it. MPI must have been initialised by the caller; with less than MPI_THREAD_SERIALIZED the plan refuses `overlap` on the
/// CPU. Every wait is watched: after `timeout_ms` without the peer, `Error(timeout)` names it. The duplicate is freed with
/// the last copy of the bootstrap, which must be gone before MPI_Finalize.
LATENT_MOE_API Bootstrap mpi_ranks(MPI_Comm communicator, int timeout_ms = 30'000);

}  // namespace latent_moe
