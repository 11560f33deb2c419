#include "io/json_part.h"

#include <utility>

#include "core/one_line.h"

namespace latent_moe::io {
namespace {

using nlohmann::json;

constexpr std::size_t longest_text = 400;

}  // namespace

JsonPart::JsonPart(std::string_view source, std::string where, const json& value)
    : source_(source), where_(std::move(where)), value_(value) {
    if (!value.is_object()) refuse(fmt::format("is a JSON {}, expected an object", value.type_name()));
}

void JsonPart::refuse(std::string_view problem) const {
    refuse_file(source_, fmt::format("{}: {}", where_, problem));
}

const json& JsonPart::field(const char* name) const {
    const auto found = value_.find(name);
    if (found == value_.end()) refuse(fmt::format("has no {}", name));
    return *found;
}

std::string JsonPart::text(const char* name) const {
    const json& value = field(name);
    if (!value.is_string()) refuse(fmt::format("{} is a JSON {}, expected a string", name, value.type_name()));
    const auto& held = value.get_ref<const std::string&>();
    if (held.size() > longest_text)
        refuse(fmt::format("{} has {} bytes, expected at most {}", name, held.size(), longest_text));
    if (one_line(held) != held) refuse(fmt::format("{} is {}, expected no control characters", name, quote(held)));
    return held;
}

std::int64_t JsonPart::whole(const char* name, std::int64_t least, std::int64_t most) const {
    const json& value = field(name);
    const bool fits = value.is_number_integer() && (!value.is_number_unsigned() || value.get<std::uint64_t>() <= INT64_MAX);
    if (!fits || value.get<std::int64_t>() < least || value.get<std::int64_t>() > most)
        refuse(fmt::format("{} is {}, expected a whole number from {} to {}", name, shown(value), least, most));
    return value.get<std::int64_t>();
}

double JsonPart::real(const char* name, double least, double most) const {
    const json& value = field(name);
    if (!value.is_number() || !(value.get<double>() >= least && value.get<double>() <= most))
        refuse(fmt::format("{} is {}, expected a number from {:g} to {:g}", name, shown(value), least, most));
    return value.get<double>();
}

bool JsonPart::truth(const char* name) const {
    const json& value = field(name);
    if (!value.is_boolean()) refuse(fmt::format("{} is {}, expected true or false", name, shown(value)));
    return value.get<bool>();
}

JsonPart JsonPart::part(const char* name) const {
    return {source_, fmt::format("{}, {}", where_, name), field(name)};
}

std::string JsonPart::shown(const json& value) {
    return value.is_structured() ? fmt::format("a JSON {}", value.type_name())
                                 : quote(value.dump(-1, ' ', false, json::error_handler_t::replace));
}

}  // namespace latent_moe::io
