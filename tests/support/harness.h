// The same tests over ranks that are threads and over ranks that are MPI processes: each has a main program that implements
// this.
#pragma once

#include <functional>

#include "latent_moe/bootstrap.h"

namespace latent_moe::test {

/// Runs `body` on `world` ranks and returns when this process's ranks are done. With processes, those beyond `world` skip
/// it, and all do where the launcher started too few.
void on_ranks(int world, const std::function<void(const Bootstrap&)>& body, int timeout_ms = 20'000);

/// Whether so many ranks can be had (with processes: whether the launcher started as many).
bool has_ranks(int world);

/// Whether ranks are threads of this process.
bool ranks_are_threads();

}  // namespace latent_moe::test
