// A model's checkpoint, as far as latent-MoE layers are concerned.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "io/latent_names.h"
#include "io/safetensors.h"

namespace latent_moe::io {

/// One layer's tensors, checked against one another. Their bytes lie in the mapped file and may be misaligned.
struct CheckpointLayer {
    std::int64_t number = 0;
    ModelFamily family = ModelFamily::kimi_k3;
    std::filesystem::path file;     ///< that holds the up-projection
    Matrix up_projection;           ///< [hidden, latent]
    std::optional<Matrix> gamma;    ///< one row of `latent` elements: RMSNorm's weight
    float scale = 1.0F;             ///< multiplies every element of the up-projection
    std::vector<float> row_scales;  ///< one factor a row, or empty

    std::int64_t hidden() const noexcept { return up_projection.rows; }
    std::int64_t latent() const noexcept { return up_projection.columns; }
};

/// One thread at a time. Layers that it hands out live as long as it does, wherever it is moved to.
class Checkpoint {
public:
    /// `path` is a safetensors file, a `model.safetensors.index.json`, or a folder that holds such an index, a
    /// `model.safetensors`, or several safetensors files. Files that an index names are opened when a layer needs them.
    static Checkpoint open(const std::filesystem::path& path);

    /// The layers found by the names of their tensors, sorted by number. May be empty.
    const std::vector<LatentLayerNames>& layers() const noexcept { return layers_; }

    /// Throws `Error(invalid_argument)` naming the layers present if `number` is not one of them, and `Error(io)` if a
    /// tensor of the layer is missing or does not fit the others.
    CheckpointLayer layer(std::int64_t number);

private:
    /// A tensor and the file it is in, which every complaint about it must name.
    struct Located {
        const TensorView* tensor;
        std::string file;
    };

    explicit Checkpoint(std::filesystem::path path) : path_(std::move(path)) {}

    void read_index(const std::filesystem::path& index);
    void read_folder(const std::filesystem::path& folder);
    void read_file(const std::filesystem::path& file);
    void add_tensor(const std::string& tensor, const std::filesystem::path& file);
    void collect_layers();

    const LatentLayerNames& find_layer(std::int64_t number) const;
    const SafetensorsFile& shard(const std::filesystem::path& file);
    std::optional<Located> locate(const std::string& tensor);
    Located require(const std::string& tensor, const LatentLayerNames& layer);
    void read_scale(CheckpointLayer& layer, const Located& scale) const;

    std::filesystem::path path_;
    std::map<std::string, std::filesystem::path> file_of_;     // the tensors of latent-MoE layers only
    std::map<std::filesystem::path, SafetensorsFile> shards_;  // those opened so far; a map's elements never move
    std::vector<LatentLayerNames> layers_;
};

}  // namespace latent_moe::io
