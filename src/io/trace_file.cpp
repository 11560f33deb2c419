#include "io/trace_file.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>

#include "io/output_file.h"

namespace latent_moe::io {

std::string chrome_trace(const std::vector<TraceSpan>& spans, const std::map<int, std::string>& process_names) {
    using Json = nlohmann::ordered_json;
    double first = spans.empty() ? 0 : spans.front().begin_us;
    for (const TraceSpan& span : spans) first = std::min(first, span.begin_us);
    Json events = Json::array();
    for (const auto& [process, name] : process_names) {
        events.push_back({{"name", "process_name"}, {"ph", "M"}, {"pid", process}, {"tid", 0}, {"args", {{"name", name}}}});
    }
    for (const TraceSpan& span : spans) {
        events.push_back({{"name", span.name},
                          {"ph", "X"},  // a complete event: begin and duration
                          {"pid", span.process},
                          {"tid", span.track},
                          {"ts", span.begin_us - first},
                          {"dur", span.duration_us}});
    }
    const Json whole = {{"displayTimeUnit", "ns"}, {"traceEvents", std::move(events)}};
    return whole.dump(1, ' ', false, Json::error_handler_t::replace) + '\n';
}

void write_trace(const std::filesystem::path& path, const std::vector<TraceSpan>& spans,
                 const std::map<int, std::string>& process_names) {
    OutputFile file(path);
    const std::string text = chrome_trace(spans, process_names);
    file.write(std::as_bytes(std::span(text)));
    file.commit();
}

}  // namespace latent_moe::io
