#include "io/checkpoint_index.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "io/report.h"
#include "io/strict_json.h"

namespace latent_moe::io {
namespace {

using nlohmann::json;

/// Symbolic links are the user's own (download caches are made of them); only what the index itself says is untrusted.
bool stays_inside(const std::string& file_name) {
    const std::filesystem::path path(file_name);
    return path.is_relative() && path.has_filename() && std::ranges::find(path, "..") == path.end();
}

bool has_nul(const std::string& text) {
    return text.find('\0') != std::string::npos;
}

}  // namespace

std::map<std::string, std::string> parse_checkpoint_index(std::string_view text, std::string_view source) {
    json index = parse_json_object(text, source, "index");
    const auto weight_map = index.find("weight_map");
    if (weight_map == index.end()) refuse_file(source, "index: has no weight_map");
    if (!weight_map->is_object()) {
        refuse_file(source, fmt::format("index: weight_map is a JSON {}, expected an object", weight_map->type_name()));
    }

    std::map<std::string, std::string> file_of;
    for (auto& [tensor, file] : weight_map->items()) {
        if (has_nul(tensor)) refuse_file(source, fmt::format("tensor {}: has a NUL character in its name", quote(tensor)));
        if (!file.is_string()) {
            refuse_file(source,
                        fmt::format("tensor {}: its file is a JSON {}, expected a string", quote(tensor), file.type_name()));
        }
        auto& file_name = file.get_ref<std::string&>();
        if (has_nul(file_name) || !stays_inside(file_name)) {
            refuse_file(source, fmt::format("tensor {}: its file {} is not inside the checkpoint's folder", quote(tensor),
                                            quote(file_name)));
        }
        file_of.emplace_hint(file_of.end(), tensor, std::move(file_name));
    }
    return file_of;
}

}  // namespace latent_moe::io
