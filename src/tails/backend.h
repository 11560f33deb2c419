// What a schedule may ask of the machine. A schedule is written once over this; CPU and GPU backends implement it.
//
// Sums over ranks run in rank order, in float32, and are rounded to the output's dtype once, on every backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/transport.h"
#include "core/function_ref.h"
#include "core/matrix.h"
#include "core/planner.h"
#include "latent_moe/context.h"

namespace latent_moe {

/// A layer's weights and γ as a backend keeps them.
class PackedLayer {
public:
    virtual ~PackedLayer() = default;
    virtual std::size_t bytes() const noexcept = 0;
};

enum class WeightPart : std::uint8_t {
    shard,  ///< the rank's own rows: its columns of the output
    whole,
};

/// out = T(addend + routed_scale · x·Wᵀ), then, where there is a prefix, out = T(out + prefix). An absent addend is zero.
struct Epilogue {
    ConstMatrix addend;  ///< may be `out` itself
    ConstMatrix prefix;  ///< may be `out` itself where the addend is not
};

/// Which of a backend's scratch matrices.
enum class Scratch : std::uint8_t {
    latent,   ///< [rows, latent]
    product,  ///< [rows, hidden]
    shared,   ///< [rows, hidden]
};

/// One ordered sequence of operations. An operation is enqueued or done; the next one of the lane sees its results.
/// The collectives are collective over the ranks: same lane, same order, same sizes.
class Lane {
public:
    virtual ~Lane() = default;

    /// out = T(Σ_ranks in), then out = T(out + prefix) where there is one; the same bits on every rank. `out` may be `in`.
    virtual void all_reduce(Step step, const ConstMatrix& in, const Matrix& out, const ConstMatrix& prefix) = 0;
    /// out = norm(T(Σ_ranks in)) with the context's norm. `out` may be `in`.
    virtual void all_reduce_norm(Step step, const ConstMatrix& in, const void* gamma, const Matrix& out) = 0;
    /// This rank's rows of T(Σ_ranks in): `own[r]` are the rows of `in` that rank r owns. `out` may be those rows of `in`.
    virtual void reduce_scatter(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out) = 0;
    /// The same, through the norm.
    virtual void reduce_scatter_norm(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const void* gamma,
                                     const Matrix& out) = 0;
    /// Rows `own[r]` of `out` come from rank r's `in`. `in` may be this rank's rows of `out`.
    virtual void all_gather(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out) = 0;

    /// latent = norm(T(Σ_ranks routed)) and own = the columns `columns[rank]` of T(Σ_ranks shared): what a rank needs to
    /// make its columns of the output. `latent` may be `routed`, `own` those columns of `shared`; an absent `shared` has no
    /// sum.
    virtual void reduce_for_columns(Step step, const ConstMatrix& routed, const void* gamma, const Matrix& latent,
                                    const ConstMatrix& shared, std::span<const TokenRange> columns, const Matrix& own) = 0;
    /// Columns `columns[r]` of `out` come from rank r's `own`; then out = T(out + prefix) where there is one. `own` may be
    /// this rank's columns of `out`.
    virtual void gather_columns(Step step, const ConstMatrix& own, std::span<const TokenRange> columns, const Matrix& out,
                                const ConstMatrix& prefix) = 0;

    virtual void project(const ConstMatrix& x, const PackedLayer& layer, WeightPart part, const Epilogue& epilogue,
                         const Matrix& out) = 0;
    /// own = the columns `columns[rank]` of T(Σ_ranks shared). `own` may be those columns of `shared`.
    virtual void reduce_columns(Step step, const ConstMatrix& shared, std::span<const TokenRange> columns,
                                const Matrix& own) = 0;
    /// out = T(a + b), then T(out + prefix) where there is one. `out` may be any of the inputs.
    virtual void add(const ConstMatrix& a, const ConstMatrix& b, const ConstMatrix& prefix, const Matrix& out) = 0;
    virtual void copy(const ConstMatrix& in, const Matrix& out) = 0;
    virtual void fill_zero(const Matrix& out) = 0;
};

/// What a call is, for the headers of its exchanges and for faults.
struct CallIdentity {
    int context = 0;
    std::uint64_t call = 0;
    std::int64_t tokens = 0;
    std::int64_t layer = -1;
    Tail tail = Tail::replicated;
    bool is_tail = true;
    bool prefix = false;
    bool starts_early = false;    ///< see `TailInput`
    bool releases_early = false;  ///< see `TailInput`
};

struct TailCall;
struct DeferredMatrix;

/// Waits for peers that the host has seen.
struct Waits {
    std::uint64_t count = 0;
    std::uint64_t us = 0;
    std::uint64_t longest_us = 0;
};

/// A layer's weights as host memory, for the self-check.
struct HostLayer {
    ConstMatrix rows;
    std::int64_t first_row = 0;         ///< of W_up
    float scale = 1;                    ///< with the shape's routed scale
    const float* row_scales = nullptr;  ///< of `rows`, or null
    const void* gamma = nullptr;
};

/// The rows of a call that was found wrong, a rank each, as host memory.
struct KeptRows {
    Tail tail = Tail::replicated;
    std::int64_t layer = -1;
    std::vector<std::vector<std::byte>> routed;
    std::vector<std::vector<std::byte>> shared;  ///< none where the context has no shared rows
};

/// The self-check where it is work of the device: enqueued with every call, captured ones too, it finds out there whether
/// the call is due. What it finds wrong is a fault of the backend's (`Backend::poll_fault`).
class DeviceCheck {
public:
    virtual ~DeviceCheck() = default;

    struct Checksums {
        std::uint64_t found;
        std::uint64_t expected;
    };
    /// Of a layer that is complete; layers in order.
    virtual void seal_layer(const PackedLayer& layer) = 0;
    /// Of a layer's weights as they are and as they were sealed. Waits for the device.
    virtual Checksums checksums(std::size_t index, const PackedLayer& layer) = 0;
    /// Between `Backend::begin_call` and the tail.
    virtual void before(const TailCall& call, const CallIdentity& identity, std::size_t index) = 0;
    /// Between the tail and `Backend::end_call`.
    virtual void after(const TailCall& call, const CallIdentity& identity, std::size_t index) = 0;
    /// Calls that were checked, replays too.
    virtual std::uint64_t checks() const noexcept = 0;
    /// After a fault: what all ranks put in, if this rank's check found it. Waits for copies.
    virtual std::optional<KeptRows> wrong_call() = 0;
};

class Backend {
public:
    virtual ~Backend() = default;

    virtual const std::string& name() const noexcept = 0;
    virtual Capabilities capabilities() const = 0;

    // Layers.
    virtual std::unique_ptr<PackedLayer> pack(const WeightView& up_projection, const void* gamma) = 0;
    /// The γ of a layer where this backend's kernels can read it.
    virtual const void* gamma(const PackedLayer& layer) const noexcept = 0;
    /// Collective: gives every rank the whole W_up of a layer that was packed from a shard. Nothing if it is there already.
    virtual void gather_whole(PackedLayer& layer) = 0;

    // Workspace. Schedules cut a call in blocks of at most this many tokens, so its size does not depend on the call's.
    virtual std::int64_t block_tokens() const noexcept = 0;
    virtual void acquire_workspace() = 0;
    virtual void release_workspace() noexcept = 0;
    virtual std::size_t workspace_bytes() const noexcept = 0;
    /// At most `block_tokens()` rows.
    virtual Matrix scratch(Scratch which, std::int64_t rows) = 0;

    // Calls.
    virtual void begin_call(const CallIdentity& identity, Stream stream) = 0;
    /// `out` is what every rank holds now (absent where ranks hold different rows): its digest goes out with the next call.
    virtual void end_call(const ConstMatrix& out) = 0;
    /// Leaves nothing running of a call that failed between `begin_call` and `end_call`. Returns what the side lane failed
    /// with, if it did (asked again, the same): a failure of one lane makes the other fail too, and only one of them knows
    /// the cause.
    virtual Status end_after_failure() noexcept = 0;
    virtual void begin_block(std::int64_t block) = 0;
    /// What the main lane has enqueued so far comes before the next call, whatever stream that is on.
    virtual void order_next_call() = 0;

    /// The combined rows of a call that hands over un-combined ones, on the main lane, in memory of the backend's own.
    /// Called between `begin_call` and the schedule, and only with `Options::deferred_finalize`.
    virtual ConstMatrix combine(const DeferredMatrix& deferred, std::int64_t tokens) = 0;

    virtual Lane& main() = 0;
    /// Starts `side_work` on a second lane, ordered after everything on the main lane so far. `side_work` must live until
    /// `join`.
    virtual void fork(FunctionRef<void(Lane& side)> side_work) = 0;
    /// Orders the main lane after the side lane; rethrows what the side work threw.
    virtual void join() = 0;

    /// The `fused` tail, which is a backend's own; called only where `Capabilities::fused`.
    virtual void fused_tail(const TailCall& call) = 0;

    /// The whole `token_parallel` tail of this call, where the backend has something better than its lanes' operations.
    /// False: it has not, and nothing was done.
    virtual bool whole_token_parallel_tail(const TailCall&) { return false; }

    /// The self-check as work of the device; null where it is the host's, or there is none.
    virtual DeviceCheck* device_check() noexcept { return nullptr; }
    // What a self-check needs on the host: inputs, output and weights that it can read, and an exchange of its own.
    virtual bool can_self_check() const noexcept { return false; }
    virtual HostLayer host_layer(const PackedLayer&) const { return {}; }
    /// Collective, within a call: every rank's `mine` to every rank, its own too.
    virtual void share(Step, const Region&, FunctionRef<void(int peer, const Region& from)>) {}
    virtual Waits waits() const noexcept { return {}; }

    /// This rank's memory that peers' devices write, for tests that damage it; empty where there is none.
    virtual std::span<std::byte> peer_window() const noexcept { return {}; }

    /// The first fault that the device or a peer reported, if any. Never blocks.
    virtual Status poll_fault() noexcept = 0;
    virtual void abort(const std::string& reason) noexcept = 0;
};

/// Side work that is joined whatever happens: what it refers to may lie on the stack behind this.
class Fork {
public:
    Fork(Backend& backend, FunctionRef<void(Lane& side)> side_work) : backend_(backend) { backend.fork(side_work); }
    ~Fork() {
        if (!joined_) static_cast<void>(backend_.end_after_failure());
    }
    Fork(const Fork&) = delete;
    Fork& operator=(const Fork&) = delete;

    void join() {
        joined_ = true;
        backend_.join();
    }

private:
    Backend& backend_;
    bool joined_ = false;
};

}  // namespace latent_moe
