#include "io/tune_file.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>

#include "io/json_part.h"
#include "io/mapped_file.h"
#include "io/output_file.h"
#include "io/report.h"
#include "io/strict_json.h"

namespace latent_moe::io {
namespace {

using nlohmann::json;

constexpr const char* schema = "latent-moe/tune/1";
constexpr std::size_t most_bytes = std::size_t{16} << 20;
constexpr double most_us = 1e12;

double microseconds(const JsonPart& point, const std::string& tail, const json& value) {
    const double us = value.is_number() ? value.get<double>() : 0;
    if (!(us > 0 && us < most_us))
        point.refuse(fmt::format("us of {} is {}, expected a number of microseconds above 0", tail, JsonPart::shown(value)));
    return us;
}

void add_point(TuneTable& table, const JsonPart& point, std::int64_t tokens) {
    const json& times = point.field("us");
    if (!times.is_object()) point.refuse(fmt::format("us is a JSON {}, expected an object", times.type_name()));
    for (const auto& [tail_name, value] : times.items()) {
        const std::optional<Tail> tail = tail_from_name(tail_name);
        if (!tail) point.refuse(fmt::format("us names {}, which is no tail", quote(tail_name)));
        table.points[static_cast<std::size_t>(*tail)].push_back({tokens, microseconds(point, tail_name, value)});
    }
}

TuneTable parse_table(std::string_view source, const std::string& where, const json& value) {
    const JsonPart part(source, where, value);
    TuneTable table{
        .key = {.version = part.text("version"),
                .device = part.text("device"),
                .links = part.text("links"),
                .world = static_cast<int>(part.whole("tp", 1, max_world)),
                .hidden = part.whole("hidden", 1, INT64_MAX),
                .latent = part.whole("latent", 1, INT64_MAX),
                .norm = part.one_of("norm", {Norm::none, Norm::rms}),
                .activations = part.one_of("dtype", {Dtype::bf16, Dtype::f16, Dtype::f32}),
                .shared = part.one_of("shared", {SharedState::partial, SharedState::reduced, SharedState::absent}),
                .sequence_parallel = part.truth("sequence_parallel"),
                .batch_invariant = part.truth("batch_invariant"),
                .float8_weights = part.truth("float8_weights")},
        .origin = part.text("origin")};
    const json& points = part.field("points");
    if (!points.is_array() || points.empty()) part.refuse("points are not a list of at least one");
    std::int64_t last = -1;
    for (std::size_t at = 0; at < points.size(); ++at) {
        const JsonPart point(source, fmt::format("{}, point {}", where, at), points[at]);
        const std::int64_t tokens = point.whole("tokens", 0, max_tokens_limit);
        if (tokens <= last) point.refuse(fmt::format("tokens is {}, expected more than the {} before it", tokens, last));
        last = tokens;
        add_point(table, point, tokens);
    }
    return table;
}

}  // namespace

std::vector<TuneTable> parse_tune_tables(std::string_view text, std::string_view source) {
    if (text.size() > most_bytes)
        refuse_file(source, fmt::format("has {} bytes, expected at most {}", text.size(), most_bytes));
    const json whole = parse_json_object(text, source, "tune table");
    const auto found = whole.find("schema");
    if (found == whole.end() || *found != schema) {
        const bool named = found != whole.end() && found->is_string();
        refuse_file(source, fmt::format("is no tune table: expected schema {}, found {}", schema,
                                        named ? found->get<std::string>().substr(0, 60) : "none"));
    }
    const auto tables = whole.find("tables");
    if (tables == whole.end() || !tables->is_array()) refuse_file(source, "has no list of tables");
    std::vector<TuneTable> parsed;
    for (std::size_t at = 0; at < tables->size(); ++at)
        parsed.push_back(parse_table(source, fmt::format("table {}", at), (*tables)[at]));
    return parsed;
}

std::vector<TuneTable> read_tune_tables(const std::filesystem::path& path) {
    const MappedFile file = MappedFile::open(path);
    return parse_tune_tables({reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()}, path.string());
}

std::string tune_text(const std::vector<TuneTable>& tables) {
    using Json = nlohmann::ordered_json;
    Json whole = {{"schema", schema}, {"tables", Json::array()}};
    for (const TuneTable& table : tables) {
        Json points = Json::array();
        for (const std::int64_t tokens : table.tokens()) {
            Json times = Json::object();
            for (int index = 0; index < tail_count; ++index) {
                for (const TunePoint& point : table.points[static_cast<std::size_t>(index)]) {
                    if (point.tokens == tokens) times[name(static_cast<Tail>(index))] = point.us;
                }
            }
            points.push_back({{"tokens", tokens}, {"us", std::move(times)}});
        }
        whole["tables"].push_back({{"version", table.key.version},
                                   {"device", table.key.device},
                                   {"links", table.key.links},
                                   {"tp", table.key.world},
                                   {"hidden", table.key.hidden},
                                   {"latent", table.key.latent},
                                   {"norm", name(table.key.norm)},
                                   {"dtype", name(table.key.activations)},
                                   {"shared", name(table.key.shared)},
                                   {"sequence_parallel", table.key.sequence_parallel},
                                   {"batch_invariant", table.key.batch_invariant},
                                   {"float8_weights", table.key.float8_weights},
                                   {"origin", table.origin},
                                   {"points", std::move(points)}});
    }
    return whole.dump(1, ' ', false, Json::error_handler_t::replace) + '\n';
}

void write_tune_tables(const std::filesystem::path& path, const std::vector<TuneTable>& tables) {
    OutputFile file(path);
    const std::string text = tune_text(tables);
    file.write(std::as_bytes(std::span(text)));
    file.commit();
}

}  // namespace latent_moe::io
