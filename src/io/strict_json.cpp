#include "io/strict_json.h"

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "io/report.h"

namespace latent_moe::io {
namespace {

using nlohmann::json;

constexpr std::size_t deepest_nesting = 32;

/// Receives the parser's events and builds the value. The library's own builder neither sees duplicate keys nor bounds
/// depth.
class StrictBuilder final : public nlohmann::json_sax<json> {
public:
    StrictBuilder(std::string_view source, std::string_view subject) : source_(source), subject_(subject) {}

    json take() { return std::move(root_); }

    bool null() override { return add(json(nullptr)); }
    bool boolean(bool value) override { return add(json(value)); }
    bool number_integer(std::int64_t value) override { return add(json(value)); }
    bool number_unsigned(std::uint64_t value) override { return add(json(value)); }
    bool number_float(double value, const std::string&) override { return add(json(value)); }
    bool string(std::string& value) override { return add(json(std::move(value))); }
    bool binary(json::binary_t&) override { return false; }  // JSON text has none

    bool start_object(std::size_t) override { return open(json::object()); }
    bool end_object() override { return close(); }
    bool start_array(std::size_t) override { return open(json::array()); }
    bool end_array() override { return close(); }

    bool key(std::string& name) override {
        const auto [position, is_new] = open_.back()->emplace(name, nullptr);
        if (!is_new) refuse(fmt::format("key {} appears twice in one object", quote(name)));
        named_ = &*position;
        return true;
    }

    bool parse_error(std::size_t position, const std::string&, const json::exception&) override {
        refuse(fmt::format("is not valid JSON at its byte {}", position));
    }

private:
    /// Elements stay where they are while a value inside them is open, so pointers to the open ones are safe to keep.
    json& place(json value) {
        if (open_.empty()) return root_ = std::move(value);
        json& parent = *open_.back();
        if (!parent.is_array()) return *named_ = std::move(value);
        parent.push_back(std::move(value));
        return parent.back();
    }

    bool add(json value) {
        place(std::move(value));
        return true;
    }

    bool open(json container) {
        if (open_.size() == deepest_nesting) refuse(fmt::format("nests deeper than {} levels", deepest_nesting));
        open_.push_back(&place(std::move(container)));
        return true;
    }

    bool close() {
        open_.pop_back();
        return true;
    }

    [[noreturn]] void refuse(std::string_view problem) const {
        refuse_file(source_, fmt::format("{}: {}", subject_, problem));
    }

    std::string_view source_;
    std::string_view subject_;
    json root_;
    std::vector<json*> open_;
    json* named_ = nullptr;  // where the value of the key just read belongs
};

}  // namespace

json parse_json_object(std::string_view text, std::string_view source, std::string_view subject) {
    if (text.find('\0') != std::string_view::npos) {
        refuse_file(source, fmt::format("{}: has a NUL byte, expected JSON text", subject));
    }
    StrictBuilder builder(source, subject);
    json::sax_parse(text.begin(), text.end(), &builder);
    json value = builder.take();
    if (!value.is_object()) {
        refuse_file(source, fmt::format("{}: is a JSON {}, expected an object", subject, value.type_name()));
    }
    return value;
}

}  // namespace latent_moe::io
