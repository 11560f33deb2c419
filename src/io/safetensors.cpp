#include "io/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "io/element_type.h"
#include "io/report.h"
#include "io/strict_json.h"

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian and are mapped as they are");

namespace latent_moe::io {
namespace {

using nlohmann::json;

constexpr std::size_t length_bytes = 8;
constexpr std::uint64_t longest_header = 100'000'000;  // the format's own limit
constexpr std::string_view metadata_key = "__metadata__";

struct Sections {
    std::string_view header;
    std::span<const std::byte> data;
};

Sections split(std::span<const std::byte> file, std::string_view source) {
    if (file.size() < length_bytes) {
        refuse_file(source, fmt::format("has {} bytes, expected at least the {} of a safetensors header length", file.size(),
                                        length_bytes));
    }
    std::uint64_t length = 0;
    std::memcpy(&length, file.data(), length_bytes);
    const auto rest = file.subspan(length_bytes);
    if (length == 0) refuse_file(source, "header length is 0, expected a JSON object");
    if (length > longest_header) {
        refuse_file(source, fmt::format("header length is {}, expected at most {} (is it a safetensors file?)", length,
                                        longest_header));
    }
    if (length > rest.size()) {
        refuse_file(source, fmt::format("header length is {}, but only {} bytes follow: truncated", length, rest.size()));
    }
    const std::string_view header(reinterpret_cast<const char*>(rest.data()), length);
    if (header.front() != '{') refuse_file(source, "header does not begin with {, expected a JSON object");
    return {header, rest.subspan(length)};
}

/// Reads one entry of the header; every complaint names the file and the tensor.
class EntryReader {
public:
    EntryReader(const std::string& name, const json& entry, std::span<const std::byte> data, std::string_view source)
        : name_(name), entry_(entry), data_(data), source_(source) {}

    TensorView read() const {
        if (name_.find('\0') != std::string::npos) refuse("has a NUL character in its name");
        if (!entry_.is_object()) refuse(fmt::format("is described by a JSON {}, expected an object", entry_.type_name()));
        const ElementType& type = element_type();
        std::vector<std::int64_t> dimensions = shape();
        const std::span<const std::byte> bytes = byte_range();
        const std::uint64_t expected = bytes_for(dimensions, type);
        if (bytes.size() != expected) {
            refuse(fmt::format("has {} bytes, expected {} for {} {}", bytes.size(), expected, type.name,
                               shape_text(dimensions)));
        }
        return {name_, std::string(type.name), type.dtype, std::move(dimensions), bytes};
    }

private:
    const json& field(const char* key) const {
        const auto found = entry_.find(key);
        if (found == entry_.end()) refuse(fmt::format("has no {}", key));
        return *found;
    }

    const ElementType& element_type() const {
        const json& value = field("dtype");
        if (!value.is_string()) refuse(fmt::format("dtype is a JSON {}, expected a string", value.type_name()));
        const auto& spelled = value.get_ref<const std::string&>();
        const ElementType* type = find_element_type(spelled);
        if (type == nullptr)
            refuse(fmt::format("dtype {} is unknown, expected BF16, F16, F32, F8_E4M3, ...", quote(spelled)));
        return *type;
    }

    std::vector<std::int64_t> shape() const {
        const json& value = field("shape");
        if (!value.is_array()) refuse(fmt::format("shape is a JSON {}, expected an array", value.type_name()));
        std::vector<std::int64_t> dimensions;
        dimensions.reserve(value.size());
        for (const json& dimension : value) {
            const std::uint64_t size = unsigned_integer(dimension, "shape");
            if (size > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
                refuse(fmt::format("shape has a dimension of {}, which does not fit 63 bits", size));
            }
            dimensions.push_back(static_cast<std::int64_t>(size));
        }
        return dimensions;
    }

    std::span<const std::byte> byte_range() const {
        const json& value = field("data_offsets");
        if (!value.is_array() || value.size() != 2) refuse("data_offsets are not an array of two integers");
        const std::uint64_t begin = unsigned_integer(value[0], "data_offsets");
        const std::uint64_t end = unsigned_integer(value[1], "data_offsets");
        if (begin > end) refuse(fmt::format("data_offsets begin at {} and end before it, at {}", begin, end));
        if (end > data_.size()) {
            refuse(fmt::format("data_offsets end at {}, but the file holds {} bytes of data: truncated", end, data_.size()));
        }
        return data_.subspan(begin, end - begin);
    }

    std::uint64_t unsigned_integer(const json& value, const char* where) const {
        if (!value.is_number_unsigned()) {
            const std::string found = value.is_number() ? value.dump() : fmt::format("a JSON {}", value.type_name());
            refuse(fmt::format("{} has {}, expected integers of at least 0", where, found));
        }
        return value.get<std::uint64_t>();
    }

    /// [2^40, 2^40, 0] is refused although it has no bytes: nobody who later multiplies some of the dimensions may overflow.
    std::uint64_t bytes_for(std::span<const std::int64_t> dimensions, const ElementType& type) const {
        std::uint64_t bits = type.bits;
        bool empty = false;
        for (const std::int64_t dimension : dimensions) {
            if (dimension == 0) {
                empty = true;
            } else if (__builtin_mul_overflow(bits, static_cast<std::uint64_t>(dimension), &bits)) {
                refuse(fmt::format("shape {} of {} overflows 64 bits", shape_text(dimensions), type.name));
            }
        }
        if (empty) return 0;
        if (bits % 8 != 0)
            refuse(fmt::format("shape {} of {} does not fill whole bytes", shape_text(dimensions), type.name));
        return bits / 8;
    }

    [[noreturn]] void refuse(std::string_view problem) const {
        refuse_file(source_, fmt::format("tensor {}: {}", quote(name_), problem));
    }

    const std::string& name_;
    const json& entry_;
    std::span<const std::byte> data_;
    std::string_view source_;
};

Metadata read_metadata(const json& entry, std::string_view source) {
    if (!entry.is_object()) {
        refuse_file(source, fmt::format("{} is a JSON {}, expected an object", metadata_key, entry.type_name()));
    }
    Metadata metadata;
    for (const auto& [key, value] : entry.items()) {
        if (!value.is_string()) {
            refuse_file(source,
                        fmt::format("{} {} is a JSON {}, expected a string", metadata_key, quote(key), value.type_name()));
        }
        metadata.emplace(key, value.get<std::string>());
    }
    return metadata;
}

/// The format lets every byte of the data belong to exactly one tensor.
void check_coverage(const std::vector<TensorView>& tensors, std::span<const std::byte> data, std::string_view source) {
    std::vector<const TensorView*> in_file_order;
    in_file_order.reserve(tensors.size());
    for (const TensorView& tensor : tensors) in_file_order.push_back(&tensor);
    std::ranges::sort(in_file_order, {}, [](const TensorView* tensor) {
        return std::pair(tensor->bytes.data(), tensor->bytes.size());  // an empty tensor comes before one that starts there
    });

    std::size_t covered = 0;
    for (const TensorView* tensor : in_file_order) {
        const auto begin = static_cast<std::size_t>(tensor->bytes.data() - data.data());
        if (begin != covered) {
            refuse_file(source, fmt::format("tensor {}: begins at byte {} of the data, expected {}: {}", quote(tensor->name),
                                            begin, covered, begin < covered ? "tensors overlap" : "a hole before it"));
        }
        covered = begin + tensor->bytes.size();
    }
    if (covered != data.size()) {
        refuse_file(source, fmt::format("{} bytes follow the last tensor, expected none", data.size() - covered));
    }
}

}  // namespace

SafetensorsContents parse_safetensors(std::span<const std::byte> file, std::string_view source) {
    const Sections sections = split(file, source);
    const json header = parse_json_object(sections.header, source, "header");

    SafetensorsContents contents;
    for (const auto& [name, entry] : header.items()) {  // in order of names
        if (name == metadata_key) {
            contents.metadata = read_metadata(entry, source);
        } else {
            contents.tensors.push_back(EntryReader(name, entry, sections.data, source).read());
        }
    }
    check_coverage(contents.tensors, sections.data, source);
    return contents;
}

Matrix as_matrix(const TensorView& tensor, std::string_view source) {
    if (!tensor.dtype) {
        refuse_request(source, fmt::format("tensor {}: has dtype {}, expected BF16, F16, F32 or F8_E4M3", quote(tensor.name),
                                           tensor.dtype_name));
    }
    const auto& shape = tensor.shape;
    if (shape.size() > 2) {
        refuse_request(source, fmt::format("tensor {}: has {} dimensions {}, expected at most 2", quote(tensor.name),
                                           shape.size(), shape_text(shape)));
    }
    const std::int64_t rows = shape.size() == 2 ? shape.front() : 1;
    const std::int64_t columns = shape.empty() ? 1 : shape.back();
    return {tensor.name, *tensor.dtype, rows, columns, tensor.bytes};
}

std::string shape_text(std::span<const std::int64_t> shape) {
    constexpr std::size_t most_dimensions_shown = 8;
    if (shape.size() <= most_dimensions_shown) return fmt::format("[{}]", fmt::join(shape, ", "));
    return fmt::format("[{}, ...]", fmt::join(shape.first(most_dimensions_shown), ", "));
}

SafetensorsFile::SafetensorsFile(std::filesystem::path path, MappedFile file, SafetensorsContents contents)
    : path_(std::move(path)), file_(std::move(file)), contents_(std::move(contents)) {}

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
    MappedFile file = MappedFile::open(path);
    SafetensorsContents contents = parse_safetensors(file.bytes(), path.string());
    return {path, std::move(file), std::move(contents)};
}

const TensorView* SafetensorsFile::find(std::string_view name) const noexcept {
    const auto& all = contents_.tensors;
    const auto found =
        std::ranges::lower_bound(all, name, {}, [](const TensorView& t) -> std::string_view { return t.name; });
    return found != all.end() && found->name == name ? &*found : nullptr;
}

const TensorView& SafetensorsFile::tensor(std::string_view name) const {
    const TensorView* found = find(name);
    if (found == nullptr) {
        refuse_request(path_.string(), fmt::format("has no tensor {} among its {}", quote(name), contents_.tensors.size()));
    }
    return *found;
}

Matrix SafetensorsFile::matrix(std::string_view name) const {
    return as_matrix(tensor(name), path_.string());
}

}  // namespace latent_moe::io
