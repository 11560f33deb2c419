// The tails on any CPU.
#pragma once

#include <memory>

#include "latent_moe/bootstrap.h"
#include "latent_moe/options.h"
#include "latent_moe/shape.h"
#include "tails/backend.h"

namespace latent_moe {

/// `bootstrap.transport` is set.
std::unique_ptr<Backend> make_cpu_backend(const Shape& shape, const Bootstrap& bootstrap, const Options& options);

/// Worker threads of one rank: `cpu_threads`, or an equal share of this machine's cores.
int cpu_threads_of_rank(const Options& options, int local_world) noexcept;

}  // namespace latent_moe
