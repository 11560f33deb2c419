// Ranks that are those of an NCCL communicator. The one public header that is about one vendor's library; it needs none of
// its headers, and the library loads NCCL at run time.
#pragma once

#include "latent_moe/bootstrap.h"
#include "latent_moe/export.h"

namespace latent_moe {

/// `communicator` is an `ncclComm_t`. It is duplicated with ncclCommSplit (collective over it), so the library's operations
/// never meet the caller's and the caller may go on using and destroy its own. The communicator's device must be usable by
/// the calling thread. Throws `Error(unavailable)` in a build or on a machine without NCCL. The duplicate ends with the last
/// copy of the bootstrap.
LATENT_MOE_API Bootstrap nccl_ranks(void* communicator, int timeout_ms = 30'000);

}  // namespace latent_moe
