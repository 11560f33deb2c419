// The kernels of this process as CUPTI saw them: those of a captured graph one by one.
#pragma once

#include <memory>
#include <string>

#include "tails/kernel_trace.h"

namespace latent_moe::gpu {

/// Empty if kernels can be traced here.
std::string why_no_trace();

/// Throws `unavailable`. One at a time in a process.
std::unique_ptr<KernelTrace> trace_kernels();

}  // namespace latent_moe::gpu
