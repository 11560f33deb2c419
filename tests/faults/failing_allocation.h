// Memory that runs out at a chosen moment: in this program `operator new` fails on demand.
#pragma once

#include <cstdint>

namespace latent_moe::faults {

/// From now on the `count`-th allocation (from 1) of this process fails with std::bad_alloc, that one alone.
void fail_allocation(std::int64_t count) noexcept;
/// No more; says whether the allocation came.
bool stop_failing() noexcept;

}  // namespace latent_moe::faults
