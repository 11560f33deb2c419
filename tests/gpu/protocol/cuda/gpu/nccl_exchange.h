// In place of src/gpu/nccl_exchange.h: there is no NCCL on an emulated GPU, and a lane that would use it fails.
#pragma once

#include <span>

#include "core/matrix.h"
#include "cuda_runtime.h"
#include "latent_moe/context.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {

class NcclExchange {
public:
    template <class... Anything>
    void all_reduce(const Anything&...) {
        refuse();
    }
    template <class... Anything>
    void reduce_scatter(const Anything&...) {
        refuse();
    }
    template <class... Anything>
    void all_gather(const Anything&...) {
        refuse();
    }
    template <class... Anything>
    void reduce_columns(const Anything&...) {
        refuse();
    }
    template <class... Anything>
    void gather_columns(const Anything&...) {
        refuse();
    }

private:
    [[noreturn]] static void refuse() { throw Error(StatusCode::internal, "NCCL was asked for"); }
};

}  // namespace latent_moe::gpu
