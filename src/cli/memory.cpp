#include "cli/memory.h"

#include <fstream>
#include <string>

namespace latent_moe::cli {
namespace {

std::size_t status_field(const std::string& field) {
    std::ifstream file("/proc/self/status");
    std::string line;
    while (std::getline(file, line)) {
        if (line.starts_with(field)) return std::stoull(line.substr(field.size())) * 1024;
    }
    return 0;
}

}  // namespace

std::size_t resident_bytes() {
    return status_field("VmRSS:");
}
std::size_t peak_resident_bytes() {
    return status_field("VmHWM:");
}

}  // namespace latent_moe::cli
