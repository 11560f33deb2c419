// Loads every kernel that a context may launch, before anything waits for a peer: the first launch of a kernel loads its
// code, which may have to wait for the device, which would wait for a kernel that waits for this one.
#pragma once

#include "gpu/lane.h"
#include "gpu/runtime/device_api.h"
#include "latent_moe/shape.h"

namespace latent_moe::gpu {

/// Kernels that exchange are launched on a window whose fault word is set, so they leave at once; `record` gets their
/// report.
void warm_up(const Shape& shape, const GpuLane::Parts& parts, std::int64_t shard_rows, bool batch_invariant,
             FaultRecord* record, cudaStream_t stream);

}  // namespace latent_moe::gpu
