#include "cpu/cpu_model.h"

#include <algorithm>
#include <fstream>

namespace latent_moe {

std::string cpu_model() {
    std::ifstream file("/proc/cpuinfo");
    std::string line;
    while (std::getline(file, line)) {
        if (line.starts_with("model name")) return line.substr(std::min(line.size(), line.find(':') + 2));
    }
    return "unknown CPU";
}

}  // namespace latent_moe
