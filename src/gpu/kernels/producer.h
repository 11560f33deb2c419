// Stands for the kernel before a tail: keeps the whole device busy for a while, then writes the tail's inputs.
#pragma once

#include <cstddef>

#include "gpu/runtime/device_api.h"

namespace latent_moe::gpu {

struct Produced {
    void* to;
    const void* from;
    std::size_t bytes;
};
inline constexpr int most_produced = 8;

/// Copies `count` pieces. `to` and `from` begin at multiples of 16.
struct Produce {
    Produced pieces[most_produced] = {};
    int count = 0;
    bool triggers_early = false;  ///< lets a dependent launch begin at once; else it begins when this kernel has ended
    /// A small CTA a multiprocessor, with the split of L1 and shared memory that a kernel of much shared memory needs, so
    /// that such a kernel's CTAs find room beside it. Otherwise every thread that the device has.
    bool leaves_room = false;
    int least_clocks = 0;  ///< a CTA is busy for at least so long before it writes
    int multiprocessors = 0;
};
cudaError_t produce(const Produce& op, cudaStream_t stream);

/// Once per device, before the first.
cudaError_t prepare_producers();

}  // namespace latent_moe::gpu
