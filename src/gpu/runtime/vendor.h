// What the vendor's world calls things, and what its devices say of themselves: the rest of the backend only asks.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "core/machine.h"

namespace latent_moe::gpu::vendor {

extern const char* const backend_name;  ///< as `--backend` knows it

/// Why there is no device here, in one line; empty if there is one.
std::string why_no_device();
/// See `BackendEntry::prepare_own_process`.
void prepare_own_process();
/// The runtime that this was built against, the driver that was found: "CUDA 13.0".
std::string built_against();
std::string driver();
/// "compute capability 9.0", "gfx942".
std::string architecture_of(int device);
/// The same from every process that sees the device.
std::array<char, 16> identity_of(int device);

/// Why the fused tail has no kernel for a device of this kind; empty if it has, as far as the architecture says.
std::string why_not_fused(int device);

/// So many multiprocessors must be free that, wherever they lie, the largest cluster of CTAs of any kernel finds its place
/// among them; 0: there are no clusters.
int free_for_a_cluster(int device);

/// Largest summand that one hop may carry to every rank, for all-reduces (above it: two hops).
std::int64_t one_stage_bytes(int world);

/// Whether that bound holds for the fused tail too.
extern const bool one_stage_bounds_fused;
/// Why the vendor's collectives may not be captured in graphs; empty if they may.
extern const char* const collectives_not_captured;

/// Constants of a device for the cost model: one rank of `world`, `sharing` of them on the device.
Machine cost_constants(int device, int sharing, int world);

}  // namespace latent_moe::gpu::vendor
