// parse_checkpoint_index over arbitrary text: it returns or throws Error, and no file name leads out of the folder.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "io/checkpoint_index.h"
#include "io/latent_names.h"
#include "latent_moe/status.h"

namespace {

void require(bool holds) {
    if (!holds) std::abort();
}

bool is_below(const std::filesystem::path& folder, const std::filesystem::path& path) {
    const std::filesystem::path relative = path.lexically_normal().lexically_relative(folder);
    return !relative.empty() && *relative.begin() != "..";
}

void check_name(std::string_view tensor) {
    const auto names = latent_moe::io::recognise_latent_tensor(tensor);
    if (!names) return;
    require(names->number >= 0);
    require(tensor == names->up_projection || tensor == names->norm || tensor == names->scale);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    check_name(text);
    try {
        const std::filesystem::path folder = "/a/checkpoint";
        for (const auto& [tensor, file] : latent_moe::io::parse_checkpoint_index(text, "fuzz")) {
            require(is_below(folder, folder / file));
            check_name(tensor);
        }
    } catch (const latent_moe::Error& error) {
        require(std::strchr(error.what(), '\n') == nullptr);
    }
    return 0;
}
