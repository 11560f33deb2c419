#include "io/tensor_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <string_view>

#include "io/element_type.h"
#include "io/report.h"

namespace latent_moe::io {
namespace {

constexpr const char* expected_names = "routed.R and shared.R for each rank R from 0, and prefix";

[[noreturn]] void refuse(const SafetensorsFile& file, std::string_view tensor, std::string_view problem) {
    refuse_file(file.path().string(), fmt::format("tensor {}: {}", quote(tensor), problem));
}

Matrix read(const SafetensorsFile& file, const TensorView& tensor) {
    if (!tensor.dtype || *tensor.dtype == Dtype::e4m3) {
        refuse(file, tensor.name, fmt::format("has dtype {}, expected BF16, F16 or F32", tensor.dtype_name));
    }
    if (tensor.shape.size() != 2 || tensor.shape.back() == 0) {
        refuse(file, tensor.name, fmt::format("has the shape {}, expected [tokens, columns]", shape_text(tensor.shape)));
    }
    return as_matrix(tensor, file.path().string());
}

/// `kind.0`, `kind.1`, … up to the first that is not there.
std::vector<Matrix> read_ranks(const SafetensorsFile& file, std::string_view kind) {
    std::vector<Matrix> ranks;
    while (const TensorView* tensor = file.find(fmt::format("{}.{}", kind, ranks.size()))) {
        ranks.push_back(read(file, *tensor));
    }
    return ranks;
}

bool is_rank_of(std::string_view tensor, std::string_view kind) {
    if (!tensor.starts_with(kind) || tensor.size() <= kind.size() + 1 || tensor[kind.size()] != '.') return false;
    return tensor.find_first_not_of("0123456789", kind.size() + 1) == std::string_view::npos;
}

/// Every tensor of the file has been read: what is left over has a rank beyond a gap, or a name that means nothing here.
void check_nothing_left(const SafetensorsFile& file, std::size_t routed, std::size_t shared, bool prefix) {
    if (routed + shared + (prefix ? 1 : 0) == file.tensors().size()) return;
    std::set<std::string> known{"prefix"};
    for (std::size_t rank = 0; rank < routed; ++rank) known.insert(fmt::format("routed.{}", rank));
    for (std::size_t rank = 0; rank < shared; ++rank) known.insert(fmt::format("shared.{}", rank));
    for (const TensorView& tensor : file.tensors()) {
        if (known.contains(tensor.name)) continue;
        if (is_rank_of(tensor.name, "routed"))
            refuse(file, tensor.name, fmt::format("expected routed.{} before it", routed));
        if (is_rank_of(tensor.name, "shared"))
            refuse(file, tensor.name, fmt::format("expected shared.{} before it", shared));
        refuse(file, tensor.name, fmt::format("is unexpected here, expected {}", expected_names));
    }
}

void check_agrees(const SafetensorsFile& file, const Matrix& tensor, const Matrix& other, bool same_columns) {
    if (tensor.rows != other.rows) {
        refuse(file, tensor.name, fmt::format("has {} tokens, expected {} as in {}", tensor.rows, other.rows, other.name));
    }
    if (same_columns && tensor.columns != other.columns) {
        refuse(file, tensor.name,
               fmt::format("has {} columns, expected {} as in {}", tensor.columns, other.columns, other.name));
    }
    if (tensor.dtype != other.dtype) {
        refuse(file, tensor.name,
               fmt::format("has dtype {}, expected {} as in {}", format_name(tensor.dtype), format_name(other.dtype),
                           other.name));
    }
}

}  // namespace

TensorFile TensorFile::open(const std::filesystem::path& path) {
    TensorFile inputs(SafetensorsFile::open(path));
    const SafetensorsFile& file = inputs.file_;
    inputs.routed_ = read_ranks(file, "routed");
    inputs.shared_ = read_ranks(file, "shared");
    if (const TensorView* prefix = file.find("prefix")) inputs.prefix_ = read(file, *prefix);
    check_nothing_left(file, inputs.routed_.size(), inputs.shared_.size(), inputs.prefix_.has_value());

    const auto& routed = inputs.routed_;
    const auto& shared = inputs.shared_;
    if (routed.empty()) refuse_file(path.string(), fmt::format("has no tensor \"routed.0\", expected {}", expected_names));
    if (!shared.empty() && shared.size() != routed.size()) {
        refuse_file(path.string(), fmt::format("has shared.R for {} ranks, expected {} as of routed.R, or none",
                                               shared.size(), routed.size()));
    }
    const auto& prefix = inputs.prefix_;
    for (const Matrix& tensor : routed) check_agrees(file, tensor, routed.front(), true);
    for (const Matrix& tensor : shared) check_agrees(file, tensor, routed.front(), false);
    for (const Matrix& tensor : shared) check_agrees(file, tensor, shared.front(), true);
    if (prefix) check_agrees(file, *prefix, routed.front(), false);
    if (prefix && !shared.empty()) check_agrees(file, *prefix, shared.front(), true);
    return inputs;
}

std::optional<std::int64_t> TensorFile::hidden() const noexcept {
    if (!shared_.empty()) return shared_.front().columns;
    if (prefix_) return prefix_->columns;
    return {};
}

}  // namespace latent_moe::io
