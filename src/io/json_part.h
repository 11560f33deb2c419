// An object within a JSON file, whose fields are read with a check each.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "io/report.h"

namespace latent_moe::io {

/// Says where in the file it is when it complains: everything throws `Error(io)`. Refers to what it was made from.
class JsonPart {
public:
    JsonPart(std::string_view source, std::string where, const nlohmann::json& value);

    [[noreturn]] void refuse(std::string_view problem) const;

    const nlohmann::json& field(const char* name) const;
    std::string text(const char* name) const;
    std::int64_t whole(const char* name, std::int64_t least, std::int64_t most) const;
    double real(const char* name, double least, double most) const;
    bool truth(const char* name) const;
    /// The object of that name.
    JsonPart part(const char* name) const;

    /// One of `values` by its name.
    template <typename Enum>
    Enum one_of(const char* field_name, std::initializer_list<Enum> values) const {
        const std::string held = text(field_name);
        std::string names;
        for (const Enum value : values) {
            if (held == name(value)) return value;
            names += fmt::format("{}{}", names.empty() ? "" : ", ", name(value));
        }
        refuse(fmt::format("{} is {}, expected one of {}", field_name, quote(held), names));
    }

    /// A value as an error tells it.
    static std::string shown(const nlohmann::json& value);

private:
    std::string_view source_;
    std::string where_;
    const nlohmann::json& value_;
};

}  // namespace latent_moe::io
