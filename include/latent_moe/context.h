// The context: ranks that agreed on a shape, one workspace, the layers' weights, and the tails that run over them.
//
// A context is one total order of calls, the same on every rank; one host thread of a rank at a time, except
// `poll_fault`, `counters` and `abort`, which any thread may call. Concurrency means another context, over a bootstrap of
// its own: contexts that share a bootstrap share its order of calls, and ranks that mix them up all fail.
//
// A call that is refused for its arguments leaves the context usable. Every later failure (a peer that is missing or in
// another call, `abort`) is final for the context and for its bootstrap: make new ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "latent_moe/bootstrap.h"
#include "latent_moe/counters.h"
#include "latent_moe/export.h"
#include "latent_moe/options.h"
#include "latent_moe/plan.h"
#include "latent_moe/shape.h"
#include "latent_moe/status.h"
#include "latent_moe/tensor.h"

namespace latent_moe {

class ContextState;   // private
class ContextAccess;  // private

/// A GPU stream of the backend's own type, or null for its default stream. On the CPU work is done when a call returns.
using Stream = void*;

/// The experts' un-combined rows, in place of `routed`: the tail combines them as its first step, for each token t
///
///     routed[t] = Σ_j weights[t, j] · rows[map[t, j]],   j in order, in float32, rounded once
///
/// where an entry of the map below 0 drops its slot. The map's entries must be below `count`; on a GPU, where they cannot be
/// checked, one that is not makes its token's row NaN.
struct DeferredRows {
    ConstRows rows = {};                ///< [count, latent] in the activation dtype; the stride may be larger
    std::int64_t count = 0;             ///< rows that there are
    std::int64_t slots = 0;             ///< experts of a token
    const void* weights = nullptr;      ///< [tokens, slots], contiguous
    Dtype weight_dtype = Dtype::f32;    ///< bf16 or f32
    const std::int32_t* map = nullptr;  ///< [tokens, slots], contiguous
};

/// The inputs of one call, `tokens` rows each, in the shape's activation dtype. Read only by the work that the call
/// enqueues; never written unless `consume_shared` says so.
struct TailInput {
    ConstRows routed = {};                   ///< [tokens, latent]: this rank's summand
    const DeferredRows* deferred = nullptr;  ///< in place of `routed`, in a context with `Options::deferred_finalize`; read
                                             ///< by the call itself, so it may be gone afterwards
    ConstRows shared = {};                   ///< [tokens, hidden]: as `Options::shared` says; null when absent
    ConstRows prefix = {};  ///< [tokens, hidden]: added last, in the activation dtype; the same on every rank; may be null.
                            ///< For a sequence-parallel context this rank's own rows of it, like `out`
    std::int64_t tokens = 0;      ///< 0 is a call like any other: every rank must make it
    bool consume_shared = false;  ///< `shared` may be overwritten (no tail needs that today)

    // Dependent launch, on GPUs that have it; used by the tails `fused` and `column_parallel`, ignored elsewhere and where
    // ranks share a GPU. Both give the caller's neighbouring kernels a duty.
    bool starts_early =
        false;  ///< The tail may start before the kernel in front of it on the stream has ended, to read weights. It
                ///< waits for that kernel's end before it reads its inputs. Duty: that kernel writes no weights.
    bool releases_early = false;  ///< The kernel behind the tail may start before the tail has ended. Duty: that kernel
                                  ///< executes griddepcontrol.wait before it touches what the tail reads or writes.
};

/// What went wrong first in a context. Sticky: later calls return it too.
struct Fault {
    int rank = -1;            ///< the rank that was waited for or that differs; -1 if none is to blame
    std::string phase;        ///< the step of the tail
    std::int64_t layer = -1;  ///< the layer's id
    std::uint64_t call = 0;   ///< the context's call number, from 0
    std::string message;
};

/// Which of a layer's rows a rank owns when the output is sharded by tokens.
struct TokenRange {
    std::int64_t first = 0;
    std::int64_t count = 0;
};

/// One layer's tail. A small handle; it shares the context's lifetime.
class LATENT_MOE_API Layer {
public:
    /// Enqueues one tail on `stream`. `out` is [tokens, hidden], or this rank's own rows of it for a sequence-parallel
    /// context. `out` may be exactly `shared` or `prefix`; any other overlap with an input is refused. Never throws; on a
    /// GPU it neither allocates nor synchronises with the host and may be captured in a graph. Results are identical bits on
    /// every rank.
    Status run(const TailInput& input, Rows out, Stream stream = nullptr) const noexcept;

    /// The same through one given tail, whatever the plan would choose. Refused with the plan's reason if it cannot run.
    Status run(Tail tail, const TailInput& input, Rows out, Stream stream = nullptr) const noexcept;

    // A call in two halves, so that the shared partials travel while the routed experts still compute. Both halves together
    // are bit for bit the call of that tail; between them the context takes no other call (an error that names the layer).

    /// Enqueues the reduction of `shared` for a tail of `tokens` rows whose output will be `out`: until `finish` the rows of
    /// `out` hold what was reduced. `out` may be exactly `shared`. The tail is the cheapest of those that have halves:
    /// `replicated`, `column_parallel`, `token_parallel`.
    Status begin(ConstRows shared, Rows out, std::int64_t tokens, Stream stream = nullptr) const noexcept;
    Status begin(Tail tail, ConstRows shared, Rows out, std::int64_t tokens, Stream stream = nullptr) const noexcept;

    /// Enqueues the rest of what `begin` started, on the same stream or another (which then waits for the first one's half;
    /// so under capture). `prefix` may not overlap `out`.
    Status finish(ConstRows routed, ConstRows prefix = {}, Stream stream = nullptr) const noexcept;

    /// -1 for a layer that was moved from.
    std::int64_t id() const noexcept;

private:
    friend class Context;
    Layer(std::shared_ptr<ContextState> state, std::size_t index) : state_(std::move(state)), index_(index) {}

    std::shared_ptr<ContextState> state_;
    std::size_t index_;
};

/// Its end is local: it waits at most `timeout_ms` for peers (on GPUs, whose collectives take leave of them), whatever they
/// do. One that was moved from may only be assigned to or destroyed; what can tell an error says so.
class LATENT_MOE_API Context {
public:
    /// Collective. Throws on every rank if any rank fails or if ranks differ in shape, options or versions, naming the
    /// field.
    static Context create(const Shape& shape, const Bootstrap& bootstrap, const Options& options = {});

    /// Local. Packs the weights; the source may be freed on return. `gamma`: `latent` elements of the activation dtype, null
    /// for `Norm::none`. A whole W_up and this rank's shard of it give bit-identical results. Layers must be added in the
    /// same order with the same ids on every rank.
    Layer add_layer(std::int64_t id, const WeightView& up_projection, const void* gamma = nullptr);

    /// Collective; once, after the last layer and before the first call. Compares the number, order and ids of
    /// the layers of all ranks (not their values), and gathers the
    /// whole W_up where `keep_whole_weights` asks for it and only a shard was given.
    void seal();

    const Shape& shape() const noexcept;
    const Options& options() const noexcept;
    const std::string& backend() const noexcept;
    int rank() const noexcept;
    int world() const noexcept;
    std::size_t layer_count() const noexcept;
    /// In the order of `add_layer`.
    Layer layer(std::size_t index) const;

    /// What would run for so many tokens, and why. Throws `invalid_argument` for a negative number.
    Plan plan(std::int64_t tokens) const;
    /// The rows of the output that `rank` owns when it is sharded by tokens: nearly equal, in rank order.
    TokenRange own_tokens(std::int64_t tokens, int rank) const noexcept;

    std::size_t weight_bytes() const noexcept;     ///< packed weights of all layers on this rank
    std::size_t workspace_bytes() const noexcept;  ///< everything else that the context holds for its calls

    /// The first fault, if any. Never blocks.
    std::optional<Fault> poll_fault() const;
    /// Any thread.
    Counters counters() const noexcept;
    /// Local; makes this context return `aborted`, and peers that wait for it as soon as they can know: at once where ranks
    /// are threads or kernels of GPUs that see each other, at their deadline where they are processes on a CPU.
    void abort(const std::string& reason = "abort() was called");

    /// Collective: gives the workspace back, keeps the layers. Calls in between return `unsupported`.
    void suspend();
    /// Collective: builds the workspace again.
    void resume();

    // The tail's parts, as operations of their own. They count as calls of the context's total order.

    /// y = norm(Σ_ranks x) with the shape's norm and ε: [tokens, latent] in, the same out on every rank. `gamma` as in
    /// `add_layer`. `y` may be exactly `x`.
    Status all_reduce_rms_norm(ConstRows x, const void* gamma, Rows y, std::int64_t tokens,
                               Stream stream = nullptr) const noexcept;

    /// C[:, columns of this rank] += routed_scale · A · W_upᵀ over the rank's own rows of W_up: A is [tokens, latent], and
    /// `c_slice` points at this rank's first column of C, `stride` being C's. Local: no rank waits for another.
    Status accumulate_projection(ConstRows a, const Layer& layer, Rows c_slice, std::int64_t tokens,
                                 Stream stream = nullptr) const noexcept;

private:
    friend class ContextAccess;
    explicit Context(std::shared_ptr<ContextState> state) : state_(std::move(state)) {}

    std::shared_ptr<ContextState> state_;
};

}  // namespace latent_moe
