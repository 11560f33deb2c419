// A small tail to compute: inputs of all ranks, weights, and what should come out.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/matrix.h"
#include "core/reference.h"
#include "latent_moe/latent_moe.h"

namespace latent_moe::test {

/// Rows with a stride in memory of their own; what lies between the rows is a pattern that `padding_intact` looks for.
class Tensor {
public:
    Tensor() = default;
    Tensor(std::int64_t rows, std::int64_t columns, Dtype dtype, std::int64_t padding = 0);

    Matrix matrix() { return {bytes_.data(), rows_, columns_, columns_ + padding_, dtype_}; }
    ConstMatrix matrix() const { return {bytes_.data(), rows_, columns_, columns_ + padding_, dtype_}; }
    ConstRows rows() const { return {bytes_.data(), columns_ + padding_}; }
    Rows writable_rows() { return {bytes_.data(), columns_ + padding_}; }
    const void* data() const { return bytes_.data(); }
    bool present() const { return columns_ != 0; }

    /// Fills rows with NaN, so that an element that nobody wrote shows.
    void poison();
    bool padding_intact() const;
    float at(std::int64_t row, std::int64_t column) const;
    void set(std::int64_t row, std::int64_t column, float value);
    /// The rows without the padding.
    std::vector<std::byte> content() const;

private:
    std::int64_t rows_ = 0;
    std::int64_t columns_ = 0;
    std::int64_t padding_ = 0;
    Dtype dtype_ = Dtype::bf16;
    std::vector<std::byte> bytes_;
};

struct ProblemOptions {
    std::int64_t hidden = 1344;  // divisible by 1 … 4, 6, 7, 8 ranks
    std::int64_t latent = 96;
    Norm norm = Norm::rms;
    Dtype dtype = Dtype::bf16;
    Dtype weight_dtype = Dtype::bf16;
    float routed_scale = 1;
    SharedState shared = SharedState::partial;
    bool prefix = true;
    std::int64_t padding = 0;
    std::uint64_t seed = 1;
};

class Problem {
public:
    Problem(int world, std::int64_t tokens, const ProblemOptions& options = {});

    Shape shape;
    int world;
    std::int64_t tokens;
    SharedState shared_state;
    std::vector<Tensor> routed;
    std::vector<Tensor> shared;
    Tensor prefix;
    Tensor weights;
    Tensor gamma;

    Options context_options() const;
    WeightView weight_view() const;
    WeightView weight_shard(int rank) const;
    const void* gamma_data() const { return gamma.present() ? gamma.data() : nullptr; }
    TailInput input(int rank) const;
    Tensor output(std::int64_t padding = 0) const { return {tokens, shape.hidden, shape.activations, padding}; }

    const std::vector<double>& reference() const;
    const std::vector<float>& chain() const;
    double chain_error() const { return relative_l2(chain(), reference()); }

    ReferenceInput reference_input() const;

private:
    mutable std::optional<std::vector<double>> reference_;  // computed once, by whoever asks first
    mutable std::optional<std::vector<float>> chain_;
};

/// What the experts of a problem's ranks would hand over un-combined: `slots` rows a token in an order of their own, more
/// columns between them than the latent, and some slots dropped.
class Uncombined {
public:
    Uncombined(const Problem& problem, std::int64_t slots, Dtype weight_dtype);

    DeferredRows deferred(int rank) const;
    /// What a separate step would make of them, by plain loops.
    Tensor combined(int rank) const;

private:
    struct OfRank {
        Tensor rows;
        Tensor weights;
        std::vector<std::int32_t> map;
    };

    std::int64_t tokens_;
    std::int64_t latent_;
    std::int64_t slots_;
    Dtype dtype_;
    Dtype weight_dtype_;
    std::vector<OfRank> ranks_;
};

/// Runs the context's only layer through the tail of its plan; the error against the reference.
double error_of(const Context& context, const Problem& problem, const Bootstrap& bootstrap);

/// A sealed context with one layer, number 7, of the problem's weights.
Context make_context(const Problem& problem, const Bootstrap& bootstrap, const Options& options);

/// What the accuracy rule allows a tail, times the chain's error.
double allowed_ratio(Tail tail);

/// True on every rank if `bytes` are the same on all of them. Collective.
bool same_on_all_ranks(const Bootstrap& bootstrap, const std::vector<std::byte>& bytes);

}  // namespace latent_moe::test
