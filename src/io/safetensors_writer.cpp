#include "io/safetensors_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "io/element_type.h"
#include "io/report.h"

namespace latent_moe::io {
namespace {

constexpr std::size_t data_alignment = 8;
constexpr std::string_view metadata_key = "__metadata__";

bool is_utf8(const std::string& text) {
    try {
        static_cast<void>(nlohmann::json(text).dump());
        return true;
    } catch (const nlohmann::json::type_error&) {
        return false;
    }
}

std::vector<TensorDeclaration> declarations(std::span<const TensorToWrite* const> tensors) {
    std::vector<TensorDeclaration> declared;
    declared.reserve(tensors.size());
    for (const TensorToWrite* tensor : tensors) declared.push_back({tensor->name, tensor->dtype, tensor->shape});
    return declared;
}

std::vector<const TensorToWrite*> widest_first(std::span<const TensorToWrite> tensors) {
    std::vector<const TensorToWrite*> ordered;
    ordered.reserve(tensors.size());
    for (const TensorToWrite& tensor : tensors) ordered.push_back(&tensor);
    std::ranges::stable_sort(ordered, std::ranges::greater{}, [](const TensorToWrite* t) { return bytes_of(t->dtype); });
    return ordered;
}

/// A tensor without elements has no rows, whatever its other dimensions say.
std::int64_t row_count(const std::vector<std::int64_t>& shape) {
    if (std::ranges::count(shape, 0) > 0) return 0;
    std::int64_t rows = 1;
    for (std::size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
    return rows;
}

}  // namespace

void write_safetensors(const std::filesystem::path& path, std::span<const TensorToWrite> tensors, const Metadata& metadata) {
    const auto ordered = widest_first(tensors);
    SafetensorsWriter writer(path, declarations(ordered), metadata);
    for (const TensorToWrite* tensor : ordered) {
        const std::int64_t rows = row_count(tensor->shape);
        if (rows > 0) writer.append_rows(tensor->name, tensor->data, rows, tensor->row_stride);
    }
    writer.finish();
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorDeclaration> tensors,
                                     const Metadata& metadata)
    : source_(path.string()), tensors_(std::move(tensors)), layouts_(lay_out()), file_(path) {
    const std::string text = header(metadata);
    const std::uint64_t length = text.size();
    file_.write(std::as_bytes(std::span(&length, 1)));
    file_.write(std::as_bytes(std::span(text)));
    skip_complete_tensors();
}

void SafetensorsWriter::append_rows(std::string_view name, const void* data, std::int64_t rows, std::int64_t row_stride) {
    if (rows == 0) return;
    if (current_ == tensors_.size()) refuse(name, "has rows to append, but every tensor is complete");
    const TensorDeclaration& tensor = tensors_[current_];
    const Layout& layout = layouts_[current_];
    if (name != tensor.name) {
        refuse(name, fmt::format("has rows to append, expected those of {} first", quote(tensor.name)));
    }
    if (rows < 0 || rows > layout.rows - rows_done_) {
        refuse(name, fmt::format("has {} rows to append, expected at most {}", rows, layout.rows - rows_done_));
    }
    if (data == nullptr) refuse(name, "has null data");
    if (row_stride != 0 && row_stride < layout.columns) {
        refuse(name, fmt::format("has a row stride of {}, expected at least its {} columns", row_stride, layout.columns));
    }
    write_rows(static_cast<const std::byte*>(data), rows, row_stride);
    rows_done_ += rows;
    skip_complete_tensors();
}

void SafetensorsWriter::finish() {
    if (current_ < tensors_.size()) {
        refuse(tensors_[current_].name, fmt::format("has {} rows, expected {}", rows_done_, layouts_[current_].rows));
    }
    file_.commit();
}

std::vector<SafetensorsWriter::Layout> SafetensorsWriter::lay_out() const {
    std::vector<Layout> layouts;
    std::set<std::string_view> names;
    std::uint64_t end = 0;
    for (const TensorDeclaration& tensor : tensors_) {
        check_name(tensor.name);
        if (!names.insert(tensor.name).second) refuse(tensor.name, "is declared twice");
        Layout layout = layout_of(tensor);
        layout.begin = end;
        if (__builtin_add_overflow(end, layout.row_bytes * static_cast<std::uint64_t>(layout.rows), &end)) {
            refuse(tensor.name, "ends beyond 64 bits of bytes");
        }
        layout.end = end;
        layouts.push_back(layout);
    }
    return layouts;
}

SafetensorsWriter::Layout SafetensorsWriter::layout_of(const TensorDeclaration& tensor) const {
    std::uint64_t bytes = bytes_of(tensor.dtype);
    for (const std::int64_t dimension : tensor.shape) {
        if (dimension < 0) refuse(tensor.name, fmt::format("has a dimension of {}, expected at least 0", dimension));
        const std::uint64_t factor = dimension == 0 ? 1 : static_cast<std::uint64_t>(dimension);
        if (__builtin_mul_overflow(bytes, factor, &bytes)) {
            refuse(tensor.name, fmt::format("has the shape {}, which overflows 64 bits", shape_text(tensor.shape)));
        }
    }
    Layout layout;
    layout.rows = row_count(tensor.shape);
    layout.columns = tensor.shape.empty() ? 1 : tensor.shape.back();
    layout.row_bytes = static_cast<std::size_t>(layout.columns) * bytes_of(tensor.dtype);
    return layout;
}

void SafetensorsWriter::check_name(const std::string& name) const {
    if (name == metadata_key) refuse(name, "is a name that the format keeps for itself");
    if (name.find('\0') != std::string::npos) refuse(name, "has a NUL character in its name");
    if (!is_utf8(name)) refuse_request(source_, "a tensor name is not valid UTF-8");
}

std::string SafetensorsWriter::header(const Metadata& metadata) const {
    for (const auto& [key, value] : metadata) {
        if (!is_utf8(key) || !is_utf8(value)) refuse_request(source_, "the metadata is not valid UTF-8");
    }
    nlohmann::json header = nlohmann::json::object();
    if (!metadata.empty()) header[std::string(metadata_key)] = metadata;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
        header[tensors_[i].name] = {{"dtype", format_name(tensors_[i].dtype)},
                                    {"shape", tensors_[i].shape},
                                    {"data_offsets", {layouts_[i].begin, layouts_[i].end}}};
    }
    std::string text = header.dump();
    text.resize((text.size() + data_alignment - 1) / data_alignment * data_alignment, ' ');
    return text;
}

void SafetensorsWriter::write_rows(const std::byte* data, std::int64_t rows, std::int64_t row_stride) {
    const Layout& layout = layouts_[current_];
    if (row_stride == 0 || row_stride == layout.columns) {
        file_.write({data, layout.row_bytes * static_cast<std::size_t>(rows)});
        return;
    }
    const std::size_t step = static_cast<std::size_t>(row_stride) * bytes_of(tensors_[current_].dtype);
    for (std::size_t row = 0; row < static_cast<std::size_t>(rows); ++row) {
        file_.write({data + row * step, layout.row_bytes});
    }
}

void SafetensorsWriter::skip_complete_tensors() {
    while (current_ < tensors_.size() && rows_done_ == layouts_[current_].rows) {
        ++current_;
        rows_done_ = 0;
    }
}

void SafetensorsWriter::refuse(std::string_view tensor, std::string_view problem) const {
    refuse_request(source_, fmt::format("tensor {}: {}", quote(tensor), problem));
}

}  // namespace latent_moe::io
