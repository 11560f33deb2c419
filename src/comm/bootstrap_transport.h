// A transport over nothing but `Bootstrap::all_gather_bytes`: right for any bootstrap, at the price of sending everything to
// everyone.
#pragma once

#include <memory>

#include "comm/transport.h"
#include "latent_moe/bootstrap.h"

namespace latent_moe {

std::shared_ptr<Transport> make_bootstrap_transport(const Bootstrap& bootstrap);

}  // namespace latent_moe
