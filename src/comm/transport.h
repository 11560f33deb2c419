// How host memory moves between ranks, and what every message says about the call that it belongs to.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/function_ref.h"
#include "latent_moe/export.h"
#include "latent_moe/plan.h"
#include "latent_moe/status.h"

namespace latent_moe {

/// The step of a call in which an exchange happens. Each tail takes its steps in an order of its own.
enum class Step : std::uint8_t {
    none,
    reduce_latent,
    reduce_shared,
    reduce_output,
    gather_latent,
    gather_output,
    gather_weights,
    self_check
};

LATENT_MOE_API const char* name(Step step) noexcept;

/// What an exchange carries beside its data. Ranks in one exchange must agree in every field.
struct ExchangeHeader {
    int context = 0;         ///< which of the contexts that share these ranks
    std::uint64_t call = 0;  ///< the context's call number
    std::int64_t tokens = 0;
    std::int64_t layer = -1;   ///< the layer's id; -1 outside layers
    std::int64_t block = 0;    ///< which block of tokens of the call
    std::uint64_t digest = 0;  ///< of the previous call's output, which must be the same bits on every rank
    Tail tail = Tail::replicated;
    bool is_tail = false;  ///< false for the tail's parts as operations of their own
    bool prefix = false;   ///< whether the call adds one
    Step step = Step::none;

    bool operator==(const ExchangeHeader&) const = default;
};

/// An error of an exchange: which rank is to blame, and at which step.
class LATENT_MOE_API ExchangeError : public Error {
public:
    ExchangeError(StatusCode code, const std::string& message, int rank, Step step)
        : Error(code, message), rank_(rank), step_(step) {}

    int rank() const noexcept { return rank_; }
    Step step() const noexcept { return step_; }

private:
    int rank_;
    Step step_;
};

/// Throws `ExchangeError(mismatch)` that names both ranks and the first field in which they differ.
LATENT_MOE_API void require_same(const ExchangeHeader& left, int left_rank, const ExchangeHeader& right, int right_rank);

/// Rows of bytes.
struct Region {
    const std::byte* data = nullptr;
    std::int64_t rows = 0;
    std::int64_t row_bytes = 0;
    std::int64_t stride_bytes = 0;

    std::int64_t bytes() const noexcept { return rows * row_bytes; }
    const std::byte* row(std::int64_t index) const noexcept { return data + index * stride_bytes; }
};

/// Copies a region's rows one after another to `destination`; returns the byte behind the last.
LATENT_MOE_API std::byte* pack(const Region& region, std::byte* destination) noexcept;

/// The consuming half of an all-gather of `bytes` bytes a rank: `incoming[r]` becomes part r of `received`. Throws
/// `mismatch` if a rank sent another number of bytes.
LATENT_MOE_API void store_gathered(std::span<const Region> incoming, int rank, void* received, std::size_t bytes);

/// Two exchanges may be under way at once, one on each channel.
enum class Channel : std::uint8_t { main, side };
inline constexpr int channel_count = 2;

class LATENT_MOE_API Transport {
public:
    using Consume = FunctionRef<void(std::span<const Region> incoming)>;

    virtual ~Transport() = default;

    virtual int rank() const noexcept = 0;
    virtual int world() const noexcept = 0;

    /// Collective on its channel. `outgoing[r]` is what rank r gets; on rank r, `incoming[q]` then holds what rank q meant
    /// for it, readable during `consume` only. Everything that a peer wrote before it called `exchange` happens before
    /// `consume`; every `consume` that reads this rank's memory happens before `exchange` returns here, so the buffers may
    /// be reused at once. Throws `mismatch` (headers differ; on every rank), `timeout` (names the missing rank) or
    /// `aborted`; after any of them the transport is broken and every later call throws.
    virtual void exchange(Channel channel, const ExchangeHeader& header, std::span<const Region> outgoing,
                          Consume consume) = 0;

    /// Larger regions are right, but cost the transport as much memory: callers cut their rows to this size where they can.
    virtual std::int64_t preferred_region_bytes() const noexcept = 0;
    /// Whether the two channels may be used by two threads at once.
    virtual bool concurrent_channels() const noexcept = 0;
    /// How data gets from rank to rank, for people and for tables of measured times.
    virtual const char* description() const noexcept = 0;
    /// Any thread; local. Waiting and later calls throw `aborted`, here at once and on peers as soon as they can know.
    virtual void abort(const std::string& reason) noexcept = 0;

    /// How long later exchanges wait for a peer.
    void set_timeout_ms(int timeout_ms) noexcept { timeout_ms_ = timeout_ms; }
    int timeout_ms() const noexcept { return timeout_ms_; }
    /// Numbers the contexts that share these ranks, the same on every rank since creation is collective.
    int add_context() noexcept { return ++contexts_; }

private:
    std::atomic<int> timeout_ms_ = 30'000;
    std::atomic<int> contexts_ = 0;
};

}  // namespace latent_moe
