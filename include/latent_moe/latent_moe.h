// The whole public API of latent-moe, except the MPI adapter (`latent_moe/mpi.h`).
#pragma once

#include "latent_moe/bootstrap.h"
#include "latent_moe/context.h"
#include "latent_moe/counters.h"
#include "latent_moe/options.h"
#include "latent_moe/plan.h"
#include "latent_moe/shape.h"
#include "latent_moe/status.h"
#include "latent_moe/tensor.h"
#include "latent_moe/version.h"
