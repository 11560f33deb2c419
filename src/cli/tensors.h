// The tensors of a call and the weights of a layer: drawn from a seed or read from files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/deferred.h"
#include "core/matrix.h"
#include "core/reference.h"
#include "io/checkpoint.h"
#include "io/tensor_file.h"
#include "latent_moe/context.h"
#include "latent_moe/shape.h"
#include "latent_moe/tensor.h"

namespace latent_moe::cli {

/// Rows that own their memory.
class Tensor {
public:
    Tensor() = default;
    Tensor(std::int64_t rows, std::int64_t columns, Dtype dtype);
    /// A copy of rows that may lie at any address.
    static Tensor copy_of(const io::Matrix& matrix);

    Matrix view() noexcept { return {data_.get(), rows_, columns_, columns_, dtype_}; }
    ConstMatrix view() const noexcept { return {data_.get(), rows_, columns_, columns_, dtype_}; }
    std::size_t bytes() const noexcept { return static_cast<std::size_t>(rows_ * columns_) * bytes_of(dtype_); }
    void fill_bytes(int value) noexcept;

private:
    std::unique_ptr<std::byte[]> data_;
    std::int64_t rows_ = 0;
    std::int64_t columns_ = 0;
    Dtype dtype_ = Dtype::bf16;
};

/// What the machine can still hand out. A request beyond it is `Error(out_of_memory)`, told before the kernel ends the
/// process.
void require_memory(double bytes, const std::string& what);
double available_memory();

/// Rows of one layer's W_up, ready for `Context::add_layer`.
struct LayerWeights {
    ConstMatrix rows;  ///< in `storage`, or in the mapped file
    Tensor storage;
    float scale = 1;
    std::vector<float> row_scales;  ///< of `rows`
    Tensor gamma;                   ///< one row in the activation dtype; empty without a norm

    WeightView view() const noexcept;
    const void* gamma_data() const noexcept { return gamma.view().data; }
};

/// Layers of a checkpoint, or layers drawn from a seed. Any thread may load.
class WeightSource {
public:
    WeightSource(const Shape& shape, Dtype dtype, std::uint64_t seed) : shape_(shape), dtype_(dtype), seed_(seed) {}
    /// `shape` is that of the layers that will be loaded.
    WeightSource(const Shape& shape, std::filesystem::path path, io::Checkpoint checkpoint);

    /// Whether layers are drawn, not read. Drawn ones have as many rows as are asked for.
    bool is_drawn() const noexcept { return !checkpoint_; }
    /// `rows`: which rows of W_up.
    LayerWeights load(std::int64_t layer, TokenRange rows);
    LayerWeights load_whole(std::int64_t layer) { return load(layer, {0, shape_.hidden}); }

    /// Up to `most` layers of this shape, from `first` on.
    std::vector<std::int64_t> layers(std::int64_t first, int most);

private:
    LayerWeights draw(std::int64_t layer, TokenRange rows) const;
    LayerWeights read(std::int64_t layer, TokenRange rows);

    Shape shape_;
    Dtype dtype_ = Dtype::bf16;
    std::uint64_t seed_ = 0;
    std::filesystem::path path_;
    std::optional<io::Checkpoint> checkpoint_;
    std::unique_ptr<std::mutex> mutex_ = std::make_unique<std::mutex>();  // a checkpoint serves one thread at a time
};

/// How γ and W_up are drawn; `synthesize` writes the same to files.
void draw_gamma(const Matrix& gamma, std::uint64_t seed, std::int64_t layer);
/// Returns the scale that goes with the rows: 1 but for e4m3.
float draw_weights(const Matrix& rows, std::uint64_t seed, std::int64_t layer, std::int64_t first_row);

/// One rank's un-combined rows: a row a token and slot, in an order of their own, in rows wider than the latent.
struct UncombinedRows {
    Tensor rows;  ///< [tokens · slots, latent + padding]
    Tensor weights;
    std::vector<std::int32_t> map;
    std::int64_t slots = 0;

    DeferredMatrix view(std::int64_t latent) const noexcept;
};

/// One call's inputs.
struct CallInputs {
    std::vector<UncombinedRows> uncombined;  ///< by rank, where they are asked for: then `routed` is what they come to,
    std::vector<Tensor> routed_exact;        ///< and this the same, unrounded in float32
    std::vector<Tensor> routed;              ///< by rank; those of ranks that are not needed here are empty
    std::vector<Tensor> shared;  ///< the same; none where shared is absent; every rank has the same rows where it is reduced
    Tensor prefix;               ///< may be empty
};

struct DrawnCall {
    Shape shape;
    int world = 1;
    std::int64_t tokens = 0;
    SharedState shared = SharedState::partial;
    bool prefix = true;
    int deferred_slots = 0;  ///< un-combined rows a token; 0: combined ones
    std::uint64_t seed = 1;
    std::uint64_t instance = 0;  ///< calls that differ in it have different tensors
};

/// `needed[rank]`: whether that rank's partials are wanted here.
CallInputs draw_inputs(const DrawnCall& call, const std::vector<bool>& needed);
CallInputs read_inputs(const io::TensorFile& file, SharedState shared, bool prefix, const std::vector<bool>& needed);

/// The reference's view of whole inputs and a whole layer.
ReferenceInput reference_input(const Shape& shape, const CallInputs& inputs, SharedState shared, const LayerWeights& layer);

}  // namespace latent_moe::cli
