#include "io/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/numeric.h"
#include "io/checkpoint_index.h"
#include "io/mapped_file.h"
#include "io/report.h"

namespace latent_moe::io {
namespace {

namespace fs = std::filesystem;

constexpr const char* index_name = "model.safetensors.index.json";
constexpr const char* single_name = "model.safetensors";

bool is_there(const fs::path& path) {
    std::error_code ignored;
    return fs::exists(path, ignored);
}

std::vector<fs::path> safetensors_files_in(const fs::path& folder) {
    std::vector<fs::path> files;
    std::error_code error;
    for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
        if (entry->path().extension() == ".safetensors") files.push_back(entry->path());
    }
    if (error) refuse_file(folder.string(), fmt::format("cannot list the folder: {}", error.message()));
    std::ranges::sort(files);
    return files;
}

/// "1-3, 5": a model has dozens of layers, a message has one line.
std::string ranges_text(std::span<const LatentLayerNames> layers) {
    std::string text;
    for (std::size_t first = 0, last = 0; first < layers.size(); first = ++last) {
        while (last + 1 < layers.size() && layers[last + 1].number == layers[last].number + 1) ++last;
        if (!text.empty()) text += ", ";
        text += fmt::format("{}", layers[first].number);
        if (last > first) text += fmt::format("-{}", layers[last].number);
    }
    return text;
}

[[noreturn]] void refuse_tensor(std::string_view file, std::string_view tensor, std::string_view problem) {
    refuse_file(file, fmt::format("tensor {}: {}", quote(tensor), problem));
}

Matrix read_up_projection(const TensorView& tensor, std::string_view file) {
    if (tensor.shape.size() != 2 || tensor.bytes.empty()) {
        refuse_tensor(file, tensor.name,
                      fmt::format("has the shape {}, expected [hidden, latent]", shape_text(tensor.shape)));
    }
    return as_matrix(tensor, file);
}

void check_is_wide(const TensorView& tensor, std::string_view file) {
    if (tensor.dtype == Dtype::e4m3) refuse_tensor(file, tensor.name, "has dtype F8_E4M3, expected BF16, F16 or F32");
}

Matrix read_gamma(const TensorView& tensor, std::string_view file, std::int64_t latent) {
    if (tensor.shape.size() != 1 || tensor.shape.front() != latent) {
        refuse_tensor(
            file, tensor.name,
            fmt::format("has the shape {}, expected [{}], the up-projection's columns", shape_text(tensor.shape), latent));
    }
    check_is_wide(tensor, file);
    return as_matrix(tensor, file);
}

std::vector<float> to_floats(const Matrix& tensor) {
    const std::vector<std::byte> aligned(tensor.bytes.begin(), tensor.bytes.end());  // the mapped ones may not be
    std::vector<float> values(static_cast<std::size_t>(tensor.rows * tensor.columns));
    widen(aligned.data(), tensor.dtype, values.data(), tensor.rows * tensor.columns);
    return values;
}

bool is_scalar(const TensorView& tensor) {
    return tensor.shape.empty() || tensor.shape == std::vector<std::int64_t>{1};
}

bool is_column(const TensorView& tensor, std::int64_t rows) {
    return tensor.shape == std::vector<std::int64_t>{rows} || tensor.shape == std::vector<std::int64_t>{rows, 1};
}

}  // namespace

Checkpoint Checkpoint::open(const fs::path& path) {
    Checkpoint checkpoint(path);
    std::error_code error;
    if (fs::is_directory(path, error)) {
        checkpoint.read_folder(path);
    } else if (path.extension() == ".json") {
        checkpoint.read_index(path);
    } else {
        checkpoint.read_file(path);
    }
    checkpoint.collect_layers();
    return checkpoint;
}

CheckpointLayer Checkpoint::layer(std::int64_t number) {
    const LatentLayerNames& names = find_layer(number);
    const Located up_projection = require(names.up_projection, names);

    CheckpointLayer layer;
    layer.number = number;
    layer.family = names.family;
    layer.file = up_projection.file;
    layer.up_projection = read_up_projection(*up_projection.tensor, up_projection.file);
    if (!names.norm.empty()) {
        const Located norm = require(names.norm, names);
        layer.gamma = read_gamma(*norm.tensor, norm.file, layer.latent());
    }
    if (const auto scale = locate(names.scale)) read_scale(layer, *scale);
    return layer;
}

void Checkpoint::read_folder(const fs::path& folder) {
    if (is_there(folder / index_name)) return read_index(folder / index_name);
    if (is_there(folder / single_name)) return read_file(folder / single_name);
    const auto files = safetensors_files_in(folder);
    if (files.empty()) {
        refuse_file(folder.string(), fmt::format("the folder has neither {} nor any *.safetensors file", index_name));
    }
    for (const fs::path& file : files) read_file(file);
}

void Checkpoint::read_index(const fs::path& index) {
    const MappedFile file = MappedFile::open(index);
    const auto bytes = file.bytes();
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    for (const auto& [tensor, file_name] : parse_checkpoint_index(text, index.string())) {
        add_tensor(tensor, index.parent_path() / file_name);
    }
}

void Checkpoint::read_file(const fs::path& file) {
    for (const TensorView& tensor : shard(file).tensors()) add_tensor(tensor.name, file);
}

void Checkpoint::add_tensor(const std::string& tensor, const fs::path& file) {
    if (!recognise_latent_tensor(tensor)) return;
    const auto [earlier, is_new] = file_of_.emplace(tensor, file);
    if (!is_new) refuse_tensor(file.string(), tensor, fmt::format("is also in {}", quote(earlier->second.string())));
}

void Checkpoint::collect_layers() {
    std::map<std::int64_t, LatentLayerNames> by_number;
    for (const auto& [tensor, file] : file_of_) {
        auto names = recognise_latent_tensor(tensor);
        const auto [earlier, is_new] = by_number.emplace(names->number, *names);
        if (!is_new && earlier->second.up_projection != names->up_projection) {
            refuse_tensor(
                path_.string(), tensor,
                fmt::format("a second layer {}: there is {} already", names->number, quote(earlier->second.up_projection)));
        }
    }
    for (auto& [number, names] : by_number) layers_.push_back(std::move(names));
}

const LatentLayerNames& Checkpoint::find_layer(std::int64_t number) const {
    const auto found = std::ranges::lower_bound(layers_, number, {}, &LatentLayerNames::number);
    if (found != layers_.end() && found->number == number) return *found;
    if (layers_.empty()) refuse_request(path_.string(), fmt::format("has no layer {}: no latent-MoE layers at all", number));
    refuse_request(path_.string(),
                   fmt::format("has no latent-MoE layer {}, expected one of {}", number, ranges_text(layers_)));
}

const SafetensorsFile& Checkpoint::shard(const fs::path& file) {
    const auto opened = shards_.find(file);
    if (opened != shards_.end()) return opened->second;
    return shards_.emplace(file, SafetensorsFile::open(file)).first->second;
}

std::optional<Checkpoint::Located> Checkpoint::locate(const std::string& tensor) {
    const auto claimed = file_of_.find(tensor);
    if (claimed == file_of_.end()) return {};
    const fs::path& file = claimed->second;
    if (!is_there(file))
        refuse_file(file.string(), fmt::format("the file is missing, expected tensor {} in it", quote(tensor)));
    const TensorView* found = shard(file).find(tensor);
    if (found == nullptr) refuse_tensor(file.string(), tensor, "is not in the file, though the index says so");
    return Located{found, file.string()};
}

Checkpoint::Located Checkpoint::require(const std::string& tensor, const LatentLayerNames& layer) {
    auto located = locate(tensor);
    if (!located) {
        refuse_file(path_.string(),
                    fmt::format("layer {} ({}) lacks tensor {}", layer.number, name(layer.family), quote(tensor)));
    }
    return *std::move(located);
}

void Checkpoint::read_scale(CheckpointLayer& layer, const Located& scale) const {
    const TensorView& tensor = *scale.tensor;
    if (layer.up_projection.dtype != Dtype::e4m3) {
        refuse_tensor(scale.file, tensor.name, "scales an up-projection that is not F8_E4M3, expected none");
    }
    if (!is_scalar(tensor) && !is_column(tensor, layer.hidden())) {
        refuse_tensor(scale.file, tensor.name,
                      fmt::format("has the shape {}, expected [], [1], [{}] or [{}, 1]", shape_text(tensor.shape),
                                  layer.hidden(), layer.hidden()));
    }
    check_is_wide(tensor, scale.file);
    std::vector<float> values = to_floats(as_matrix(tensor, scale.file));
    if (!std::ranges::all_of(values, [](float value) { return std::isfinite(value); })) {
        refuse_tensor(scale.file, tensor.name, "has a value that is not finite");
    }
    if (is_scalar(tensor)) {
        layer.scale = values.front();
    } else {
        layer.row_scales = std::move(values);
    }
}

}  // namespace latent_moe::io
