// The backend on GPUs, behind the interface that every schedule is written over.
#pragma once

#include "context/backends.h"

namespace latent_moe {

/// Works in every build that has a GPU compiler; says what is missing where the machine cannot run it.
BackendEntry gpu_backend_entry();

}  // namespace latent_moe
