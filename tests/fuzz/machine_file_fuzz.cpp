// parse_machine over arbitrary text: it returns or throws Error in one line, what it returns gives every tail a finite time
// and is written so that it reads the same again.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "core/cost_model.h"
#include "io/machine_file.h"
#include "latent_moe/status.h"

namespace {

void require(bool holds) {
    if (!holds) std::abort();
}

void predict_for(const latent_moe::MachineKind& kind) {
    for (const int world : {1, 2, 16}) {
        for (int tail = 0; tail < latent_moe::tail_count; ++tail) {
            const double us = latent_moe::expected_us(
                static_cast<latent_moe::Tail>(tail),
                {.shape = {.hidden = 7168, .latent = 3584}, .world = world, .tokens = 65536}, kind.of(world));
            require(std::isfinite(us) && us >= 0);
        }
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    try {
        const latent_moe::MachineKind kind = latent_moe::io::parse_machine(text, "fuzz");
        predict_for(kind);
        require(latent_moe::io::parse_machine(latent_moe::io::machine_text(kind), "again") == kind);
    } catch (const latent_moe::Error& error) {
        require(std::strchr(error.what(), '\n') == nullptr);
    }
    return 0;
}
