#include "support/harness.h"

namespace latent_moe::test {

void on_ranks(int world, const std::function<void(const Bootstrap&)>& body, int timeout_ms) {
    run_thread_ranks(world, body, timeout_ms);
}

bool has_ranks(int) {
    return true;
}

bool ranks_are_threads() {
    return true;
}

}  // namespace latent_moe::test
