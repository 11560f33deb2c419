// x·Wᵀ in blocks of columns through oneDNN, with an epilogue of our own.
//
// oneDNN is called by one thread at a time on blocks of a fixed width, whatever the number of workers, and writes contiguous
// float32: so neither the bits nor the rounding depend on the machine's cores or on what ran before (docs/numerics.md).
// Where the CPU has bf16 products and bf16 holds all operands they are used; elsewhere operands are widened to float32.
// Weights are widened block by block, exactly.
//
// Which kernel oneDNN takes depends on the number of tokens, and so do a row's bits. Where they must not, every row is
// multiplied on its own.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "core/matrix.h"
#include "cpu/workers.h"
#include "tails/backend.h"

namespace latent_moe {

/// W_up's rows as the CPU reads them: contiguous, of any dtype, with scales that apply to the product's columns.
struct ProductWeights {
    ConstMatrix rows;
    float scale = 1;
    const float* row_scales = nullptr;
};

class Product {
public:
    enum class Arithmetic : std::uint8_t { automatic, widened };

    /// `most_tokens`: rows of x at a time; `depth`: columns of x.
    Product(Workers& workers, std::int64_t most_tokens, std::int64_t depth, Arithmetic arithmetic = Arithmetic::automatic,
            bool row_by_row = false);
    ~Product();

    /// out = T(addend + scale · x·Wᵀ), then T(out + prefix): see `Epilogue`.
    void run(const ConstMatrix& x, const ProductWeights& weights, const Epilogue& epilogue, const Matrix& out);

    /// Whether this CPU multiplies bf16 natively.
    bool native_bf16() const noexcept;
    std::size_t workspace_bytes() const noexcept;

private:
    class State;
    std::unique_ptr<State> state_;
};

}  // namespace latent_moe
