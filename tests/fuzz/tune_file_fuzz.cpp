// parse_tune_tables over arbitrary text: it returns or throws Error in one line, what it returns can be planned by and is
// written so that it reads the same again.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "core/planner.h"
#include "io/tune_file.h"
#include "latent_moe/status.h"

namespace {

void require(bool holds) {
    if (!holds) std::abort();
}

void plan_by(const latent_moe::TuneTable& table) {
    const latent_moe::Planner planner({.hidden = 96, .latent = 64}, 2, {}, {.fused = true, .whole_weights = true},
                                      {.table = table});
    for (const std::int64_t tokens : {0, 1, 100, 8192}) require(planner.choose(tokens).has_value());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    try {
        const auto tables = latent_moe::io::parse_tune_tables(text, "fuzz");
        for (const latent_moe::TuneTable& table : tables) plan_by(table);
        require(latent_moe::io::parse_tune_tables(latent_moe::io::tune_text(tables), "again") == tables);
    } catch (const latent_moe::Error& error) {
        require(std::strchr(error.what(), '\n') == nullptr);
    }
    return 0;
}
