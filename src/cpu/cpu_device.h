// The CPU as a `Device`: memory is host memory, and work is done when it is enqueued.
#pragma once

#include <memory>

#include "tails/device.h"

namespace latent_moe {

std::unique_ptr<Device> make_cpu_device();

}  // namespace latent_moe
