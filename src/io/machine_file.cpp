#include "io/machine_file.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "core/one_line.h"
#include "io/json_part.h"
#include "io/mapped_file.h"
#include "io/strict_json.h"

namespace latent_moe::io {
namespace {

constexpr const char* schema = "latent-moe/machine/1";
constexpr const char* info_schema = "latent-moe/info/1";
constexpr std::size_t most_bytes = std::size_t{1} << 20;
constexpr double least_rate = 1e-3;  // bytes or operations a microsecond
constexpr double most_rate = 1e15;
constexpr double most_us = 1e9;

/// Every number of a machine with its name and what it may be, once for both directions: `visit` gets the value too.
template <typename AMachine, typename Visit>
void for_each_constant(AMachine& machine, Visit visit) {
    visit("memory_bytes_per_us", machine.memory_bytes_per_us, least_rate, most_rate);
    visit("flops_per_us", machine.flops_per_us, least_rate, most_rate);
    visit("wire_bytes_per_us", machine.wire_bytes_per_us, least_rate, most_rate);
    visit("hop_us", machine.hop_us, 0.0, most_us);
    visit("launch_us", machine.launch_us, 0.0, most_us);
    visit("collective_us", machine.collective_us, 0.0, most_us);
}

template <typename AReached, typename Visit>
void for_each_part(AReached& reached, Visit visit) {
    visit("early_launch", reached.early_launch, 0.0, 1.0);
    visit("contention", reached.contention, 0.0, 1.0);
    visit("all_reduce", reached.all_reduce, 1e-3, 1.0);
    visit("scatter_gather", reached.scatter_gather, 1e-3, 1.0);
    visit("side_lane", reached.side_lane, 1e-3, 1.0);
    visit("gathering", reached.gathering, 1e-3, 1.0);
}

template <typename ABest, typename Visit>
void for_each_best(ABest& best, Visit visit) {
    visit("flops_per_us", best.flops_per_us, 0.0, most_rate);
    visit("wire_bytes_per_us", best.wire_bytes_per_us, 0.0, most_rate);
    visit("hop_us", best.hop_us, 0.0, most_us);
    visit("launch_us", best.launch_us, 0.0, most_us);
}

auto reading(const JsonPart& part) {
    return [&part](const char* name, double& value, double least, double most) { value = part.real(name, least, most); };
}

auto writing(nlohmann::ordered_json& json) {
    return [&json](const char* name, double value, double, double) { json[name] = value; };
}

MachineKind machine_of(const nlohmann::json& value, std::string_view source) {
    const JsonPart part(source, "machine", value);
    if (part.text("schema") != schema) refuse_file(source, fmt::format("is no machine: expected schema {}", schema));
    MachineKind kind{.name = part.text("name"), .origin = part.text("origin")};
    kind.machine.description = part.text("description");
    for_each_constant(kind.machine, reading(part));
    const JsonPart reached = part.part("reached");
    for_each_part(kind.machine.reached, reading(reached));
    kind.machine.reached.early_tokens = reached.whole("early_tokens", 0, max_tokens_limit);
    kind.machine.reached.pooled_from_tokens = reached.whole("pooled_from_tokens", 0, max_tokens_limit + 1);
    for_each_best(kind.machine.best, reading(part.part("best")));
    kind.link_bytes_per_us = part.real("link_bytes_per_us", 0, most_rate);
    kind.linked_ranks = static_cast<int>(part.whole("linked_ranks", 1, max_world));
    kind.fused = part.truth("fused");
    const nlohmann::json& unmeasured = part.field("unmeasured");
    if (!unmeasured.is_array()) part.refuse("unmeasured is no list");
    for (const nlohmann::json& each : unmeasured) {
        if (!each.is_string() || one_line(each.get<std::string>()) != each.get<std::string>())
            part.refuse(fmt::format("unmeasured holds {}, expected names of constants", JsonPart::shown(each)));
        kind.unmeasured.push_back(each.get<std::string>());
    }
    return kind;
}

}  // namespace

MachineKind parse_machine(std::string_view text, std::string_view source) {
    if (text.size() > most_bytes)
        refuse_file(source, fmt::format("has {} bytes, expected at most {}", text.size(), most_bytes));
    const nlohmann::json whole = parse_json_object(text, source, "machine");
    const auto found = whole.find("schema");
    if (found == whole.end() || *found != info_schema) return machine_of(whole, source);
    const auto machine = whole.find("machine");
    if (machine == whole.end()) refuse_file(source, "holds no machine: expected JSON of info --measure");
    return machine_of(*machine, source);
}

MachineKind read_machine(const std::filesystem::path& path) {
    const MappedFile file = MappedFile::open(path);
    return parse_machine({reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()}, path.string());
}

std::string machine_text(const MachineKind& kind) {
    using Json = nlohmann::ordered_json;
    Json json = {
        {"schema", schema}, {"name", kind.name}, {"origin", kind.origin}, {"description", kind.machine.description}};
    for_each_constant(kind.machine, writing(json));
    json["reached"] = Json::object();
    for_each_part(kind.machine.reached, writing(json["reached"]));
    json["reached"]["early_tokens"] = kind.machine.reached.early_tokens;
    json["reached"]["pooled_from_tokens"] = kind.machine.reached.pooled_from_tokens;
    json["best"] = Json::object();
    for_each_best(kind.machine.best, writing(json["best"]));
    json["link_bytes_per_us"] = kind.link_bytes_per_us;
    json["linked_ranks"] = kind.linked_ranks;
    json["fused"] = kind.fused;
    json["unmeasured"] = kind.unmeasured;
    return json.dump(1, ' ', false, Json::error_handler_t::replace) + '\n';
}

}  // namespace latent_moe::io
