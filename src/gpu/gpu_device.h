// A GPU for callers that are not GPU programs: the command line, tests.
#pragma once

#include <memory>

#include "latent_moe/bootstrap.h"
#include "latent_moe/options.h"
#include "tails/device.h"

namespace latent_moe::gpu {

std::unique_ptr<Device> make_gpu_device(const Bootstrap& bootstrap, const Options& options);

}  // namespace latent_moe::gpu
