// What the ranks of `run`, `verify`, `bench` and `op` do alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/problem.h"
#include "latent_moe/context.h"
#include "tails/device.h"

namespace latent_moe::cli {

/// Collective: a sealed context with these layers.
Context make_context(Problem& problem, const Bootstrap& bootstrap, const std::vector<std::int64_t>& layers);

/// Whether `tail` may run so many tokens; if not, why.
std::optional<std::string> refusal_of(const Plan& plan, Tail tail);

/// Throws `unsupported`: of the tails that were asked for none can run for any of the numbers of tokens.
[[noreturn]] void throw_none_can_run(const TailChoice& choice, const Refusal* first_refusal);

struct DeviceRelease {
    Memory* owner = nullptr;
    void operator()(std::byte* memory) const noexcept { owner->release(memory); }
};

/// Rows in the memory of a rank's device.
class DeviceTensor {
public:
    DeviceTensor() = default;
    DeviceTensor(Memory& memory, std::int64_t rows, std::int64_t columns, Dtype dtype);
    /// A copy of contiguous rows of the host's or of this memory; empty if they are absent.
    DeviceTensor(Memory& memory, const ConstMatrix& source);

    Matrix view() const noexcept { return {memory_.get(), rows_, columns_, columns_, dtype_}; }
    std::size_t bytes() const noexcept { return static_cast<std::size_t>(rows_ * columns_) * bytes_of(dtype_); }

private:
    std::unique_ptr<std::byte, DeviceRelease> memory_;
    std::int64_t rows_ = 0;
    std::int64_t columns_ = 0;
    Dtype dtype_ = Dtype::bf16;
};

/// Collective: the device of this rank, as the context will choose it.
std::unique_ptr<Device> make_device(const Options& options, const Bootstrap& bootstrap);

/// One rank's inputs on its device.
struct RankInputs {
    DeviceTensor routed;  ///< combined rows, or those that `uncombined` refers to
    DeviceTensor slot_weights;
    DeviceTensor row_map;
    DeviceTensor shared;
    DeviceTensor prefix;
    std::int64_t slots = 0;  ///< of un-combined rows
    std::optional<DeferredRows> uncombined;

    RankInputs(Memory& memory, const CallInputs& inputs, int rank);
    /// A copy of others, in the same kind of memory or in another of the same device.
    RankInputs(Memory& memory, const RankInputs& others);
    /// What a call of the first `tokens` tokens gets; of the prefix only the rows that the rank wants. Refers to this.
    TailInput of(const Context& context, std::int64_t tokens) const noexcept;
    std::size_t bytes() const noexcept { return routed.bytes() + shared.bytes() + prefix.bytes(); }

private:
    void refer_to_uncombined();
};

/// One rank's output on its device, and a host copy to look at.
class RankOutput {
public:
    RankOutput(Device& device, const Context& context, std::int64_t most_tokens);

    Rows rows() const noexcept { return rows_.view().data; }
    std::size_t bytes() const noexcept { return rows_.bytes(); }
    void fill_bytes(int value);
    /// What this rank holds after a call of `tokens`: all rows, or its own where the caller is sequence-parallel. Waits for
    /// it.
    ConstMatrix written(std::int64_t tokens);
    /// Collective: the whole output.
    ConstMatrix whole(const Bootstrap& bootstrap, std::int64_t tokens);

private:
    Device* device_;
    const Context* context_;
    DeviceTensor rows_;
    Tensor host_;
    Tensor whole_;
};

/// Collective: the rows of a sequence-parallel call, of which each rank holds its own, contiguous.
Tensor gather_own_rows(const Bootstrap& bootstrap, const Context& context, const ConstMatrix& own, std::int64_t tokens);

/// Collective: whether all ranks hold the same bits.
bool same_on_all_ranks(const Bootstrap& bootstrap, const ConstMatrix& matrix);

struct Timing {
    double median_us = 0;
    double p10_us = 0;
    double p90_us = 0;
    int repeats = 0;
};

/// The median of all and what spreads around it.
Timing summary_of(std::vector<double> us);

/// Work that is timed: calls that enqueue it and that take turns.
using Turns = std::vector<std::function<void()>>;

struct HowToTime {
    std::optional<int> repeats;      ///< else as many as fit in a quarter of a second a contestant, 5 to 100
    bool turns_in_one = true;        ///< short turns follow each other in one recording, so that its launch does not show
    std::function<void()> check;     ///< throws if what ran since the last time went wrong
    std::function<void(int)> begin;  ///< told which contestant is next to be prepared
};

/// Collective: microseconds of one turn, by contestant and repetition. The contestants run side by side, one after another
/// in each repetition. Ranks start together; the slowest counts. What the calls refer to must outlive this.
std::vector<std::vector<double>> time_side_by_side(const Bootstrap& bootstrap, Device& device, const HowToTime& how,
                                                   const std::vector<Turns>& contestants);

/// The same for one.
inline Timing time_call(const Bootstrap& bootstrap, Device& device, std::optional<int> repeats,
                        const std::function<void()>& call) {
    return summary_of(time_side_by_side(bootstrap, device, {.repeats = repeats}, {{call}}).front());
}

/// For people: "hidden 7168, latent 3584, norm rms (eps 1e-05), bf16"
std::string shape_text(const Shape& shape);

}  // namespace latent_moe::cli
