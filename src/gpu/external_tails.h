// The peers of `bench` on GPUs: NCCL for the collectives and cuBLASLt for the product, put together as engines do, in the
// schedules that they use. Norm and addition are kernels of ours, one each. Every schedule twice:
//
//     plain      buffers as any allocator gives them
//     symmetric  buffers in windows that NCCL knows on every rank, which is its fastest way for small messages
#pragma once

#include <memory>

#include "latent_moe/bootstrap.h"
#include "latent_moe/options.h"
#include "latent_moe/shape.h"
#include "tails/device.h"
#include "tails/external.h"

namespace latent_moe::gpu {

/// Collective. What cannot run here is in `refused`, with the reason.
std::unique_ptr<ExternalTails> make_external_tails(const Shape& shape, const Bootstrap& bootstrap, const Options& options,
                                                   Device& device);

}  // namespace latent_moe::gpu
