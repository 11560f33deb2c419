// The self-check on the device: two kernels of every call of a context that checks itself, which find out on the device
// whether the call is due (a captured call is replayed without the host) and do nothing where it is not.
#pragma once

#include <cstdint>

#include "gpu/primitives/window.h"
#include "gpu/runtime/device_api.h"
#include "latent_moe/tensor.h"

namespace latent_moe::gpu {

inline constexpr int most_checked_rows = 16;
inline constexpr int most_weight_parts = 5;
inline constexpr int most_windows = 4;

/// A layer's memory, every byte of which counts in its checksum.
struct WeightParts {
    const void* data[most_weight_parts];
    std::int64_t bytes[most_weight_parts];  ///< 0: none
};

/// 64 bits in two words, each a sum that does not depend on the order in which threads add to it.
struct WeightChecksum {
    std::uint32_t words[2];
    bool operator==(const WeightChecksum&) const = default;
};

/// On the device, one a layer; zeroed, then `expected` set.
struct LayerCheck {
    std::uint32_t calls;
    WeightChecksum expected;
};

/// On the device, one a context; zeroed.
struct CheckState {
    std::uint32_t due;     ///< whether the call under way is checked
    std::uint32_t buffer;  ///< where its rows were kept (0 or 1)
    std::uint32_t rows;
    std::uint32_t ticket;  ///< CTAs that are done
    WeightChecksum found;  ///< so far
    std::int64_t tokens[most_checked_rows];
    float cancellation[most_checked_rows];  ///< √(ranks · Σ‖partial‖²) / ‖Σ partial‖ of a row of the latent
};

enum class Found : std::uint32_t { nothing, weights, output };

/// What the host is told, in host-mapped memory; complete when the exchange's fault record has its code.
struct CheckReport {
    std::uint32_t checks;  ///< calls that were checked
    Found found;
    std::uint32_t buffer;
    std::uint32_t rows;
    std::uint32_t tail;
    std::int32_t layer;
    std::int64_t row;  ///< of the call, and the column
    std::int64_t column;
    float value;
    float chain;  ///< what the unfused chain gives
    float tolerance;
    WeightChecksum checksum;
    WeightChecksum expected;
};

/// Bytes of the rows that a rank keeps where its peers read them, twice: routed, then shared.
std::int64_t kept_bytes(std::int64_t latent, std::int64_t hidden, Dtype dtype);

/// Device scratch of one rank: the chain's values on the way.
struct CheckScratch {
    void* latent;    ///< [16, latent]: the sum of the latents, normalised
    void* shared;    ///< [16, hidden]: the sum of the shared rows
    void* prefix;    ///< [16, hidden]
    float* addends;  ///< [16, hidden]: Σ|…| of what is added to the projection
    float* chain;    ///< [16, hidden]
};
/// Of each of the five, in the order above, rounded up to 256.
struct CheckScratchBytes {
    std::int64_t parts[5];
};
CheckScratchBytes check_scratch_bytes(std::int64_t latent, std::int64_t hidden, Dtype dtype);

/// All that both kernels need. `exchange` is that of a window of the check's own: |Control| kept rows, twice |.
struct CheckCall {
    Exchange exchange;
    void* other_controls[most_windows][max_ranks];  ///< of the windows that a mismatch stops too; null: none
    int windows = 0;
    std::int64_t period = 0;
    std::int64_t layer_index = 0;  ///< layers take turns
    LayerCheck* layer = nullptr;
    CheckState* state = nullptr;
    CheckReport* report = nullptr;
    CheckScratch scratch{};

    Dtype dtype = Dtype::bf16;
    std::int64_t hidden = 0;
    std::int64_t latent = 0;
    std::int64_t tokens = 0;
    bool own_rows_only = false;  ///< `prefix` and `out` hold this rank's own rows
    ConstRows routed;
    ConstRows shared;  ///< null: absent
    bool shared_is_sum = false;
    ConstRows prefix;  ///< null: absent
    ConstRows out;
    std::int64_t own_first = 0;  ///< of this rank's tokens, where it has only its own
    std::int64_t own_count = 0;
    std::int64_t first_column = 0;  ///< that this rank checks
    std::int64_t columns = 0;
    bool late_reduce = false;  ///< rounds every rank's projected partial

    const void* gamma = nullptr;  ///< null: no norm
    float epsilon = 1e-5F;
    WeightParts parts{};           ///< for the checksum
    const void* plain = nullptr;   ///< W_up of those columns: rows of `latent` elements of `weight_dtype`, …
    const void* packed = nullptr;  ///< … or, where that is null, packed 16-bit elements (packed_layout.h)
    std::int64_t packed_rows = 0;  ///< of the packed matrix
    Dtype weight_dtype = Dtype::bf16;
    float scale = 1;
    const float* row_scales = nullptr;
};

/// In front of the call: counts it; where it is due, keeps the rows that will be checked, since the call may overwrite its
/// inputs, meets the peers, and makes the sums of the chain from what they kept.
cudaError_t keep_for_check(const CheckCall& call, cudaStream_t stream);

/// Behind it: where it is due, the checksum of the weights, and every element of those rows and columns against the chain.
/// What is wrong goes into the report and stops all ranks.
cudaError_t compare_with_chain(const CheckCall& call, cudaStream_t stream);

/// `sum` is zeroed device memory.
cudaError_t checksum_of_weights(const WeightParts& parts, WeightChecksum* sum, cudaStream_t stream);

}  // namespace latent_moe::gpu
