// Chrome's trace format, which Perfetto reads too: spans on tracks of processes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace latent_moe::io {

struct TraceSpan {
    std::string name;
    int process = 0;
    std::uint64_t track = 0;
    double begin_us = 0;
    double duration_us = 0;
};

/// The whole file as text. Time counts from the first span.
std::string chrome_trace(const std::vector<TraceSpan>& spans, const std::map<int, std::string>& process_names);

void write_trace(const std::filesystem::path& path, const std::vector<TraceSpan>& spans,
                 const std::map<int, std::string>& process_names);

}  // namespace latent_moe::io
