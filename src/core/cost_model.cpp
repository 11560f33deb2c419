#include "core/cost_model.h"

#include <algorithm>
#include <cmath>

namespace latent_moe {
namespace {

/// Of the memory's rate, what gathering reaches: each word is waited for on its own. On H200s the fused tail took 13.5, 22.4
/// and 44.7 us at 32, 64 and 128 tokens, of which this explains what is beyond 9.7 at 16 (docs/performance.md).
constexpr double gathering_rate = 0.42;
constexpr double tile_columns = 128;  ///< of the fused tail's product

}  // namespace

Work work_of(Tail tail, const Shape& shape, int world, std::int64_t tokens, SharedState shared,
             double weight_element_bytes) {
    const double ranks = world;
    const auto m = static_cast<double>(tokens);
    const auto element = static_cast<double>(bytes_of(shape.activations));
    const double latent_bytes = m * static_cast<double>(shape.latent) * element;
    const double hidden_bytes = m * static_cast<double>(shape.hidden) * element;
    const double whole_weights =
        static_cast<double>(shape.hidden) * static_cast<double>(shape.latent) * weight_element_bytes;
    const double whole_flops = 2 * m * static_cast<double>(shape.hidden) * static_cast<double>(shape.latent);
    const bool reduces_shared = shared == SharedState::partial && world > 1;
    // A reduce-scatter or an all-gather of b bytes sends b·(R−1)/R from each rank; an all-reduce is one of each.
    const double scatter = (ranks - 1) / ranks;
    const double all_reduce = 2 * scatter;
    const int reduction_hops = world > 1 ? 2 : 0;

    Work work{.weight_bytes = whole_weights, .activation_bytes = latent_bytes * 3 + hidden_bytes * 3, .flops = whole_flops};
    switch (tail) {
        case Tail::replicated:
        case Tail::overlap:
            work.wire_bytes = all_reduce * (latent_bytes + (reduces_shared ? hidden_bytes : 0));
            work.hideable_wire_bytes = tail == Tail::overlap && reduces_shared ? all_reduce * hidden_bytes : 0;
            work.hops = reduction_hops * (reduces_shared && tail == Tail::replicated ? 2 : 1);
            work.collectives = world > 1 ? (reduces_shared ? 2 : 1) : 0;
            work.launches = 2 + work.collectives + (tail == Tail::overlap ? 1 : 0);
            break;
        case Tail::column_parallel:
            work.weight_bytes = whole_weights / ranks;
            work.flops = whole_flops / ranks;
            work.wire_bytes = all_reduce * (latent_bytes + hidden_bytes);
            work.hops = 2 * reduction_hops;
            work.collectives = 2;
            work.launches = 4;
            break;
        case Tail::token_parallel:
            work.activation_bytes /= ranks;
            work.flops = whole_flops / ranks;
            work.wire_bytes = scatter * (latent_bytes + (reduces_shared ? 2 : 1) * hidden_bytes);
            work.hops = 3;
            work.collectives = 3;
            work.launches = 5;
            break;
        case Tail::late_reduce:
            work.wire_bytes = all_reduce * hidden_bytes;
            work.hops = reduction_hops;
            work.collectives = 1;
            work.launches = 2;
            break;
        case Tail::fused:
            // Every rank gets every latent partial; shared slices go to their owners and finished columns to everyone.
            work.weight_bytes = whole_weights / ranks;
            work.flops = whole_flops / ranks;
            work.wire_bytes =
                (ranks - 1) * latent_bytes + (reduces_shared ? scatter * hidden_bytes : 0) + scatter * hidden_bytes;
            work.hideable_wire_bytes = work.wire_bytes;
            work.gathered_bytes = std::ceil(static_cast<double>(shape.hidden) / ranks / tile_columns) * ranks * latent_bytes;
            work.hops = 2;
            work.launches = 1;
            break;
    }
    return work;
}

double expected_us(const Work& work, const Machine& machine) noexcept {
    const double product = std::max((work.weight_bytes + work.activation_bytes) / machine.memory_bytes_per_us,
                                    work.flops / machine.flops_per_us);
    const double hideable = work.hideable_wire_bytes / machine.wire_bytes_per_us;
    const double exposed = (work.wire_bytes - work.hideable_wire_bytes) / machine.wire_bytes_per_us;
    const double fixed =
        work.hops * machine.hop_us + work.launches * machine.launch_us + work.collectives * machine.collective_us;
    const double gathering = work.gathered_bytes / (gathering_rate * machine.memory_bytes_per_us);
    return fixed + exposed + gathering + std::max(product, hideable);
}

double floor_us(int world, const Work& work, const Machine& machine) noexcept {
    const auto best = [](double limit, double usual) { return limit > 0 ? limit : usual; };
    const Machine::Best& limits = machine.best;
    const double busy = std::max({work.weight_bytes / machine.memory_bytes_per_us,
                                  work.flops / best(limits.flops_per_us, machine.flops_per_us),
                                  work.wire_bytes / best(limits.wire_bytes_per_us, machine.wire_bytes_per_us)});
    return busy + (world > 1 ? best(limits.hop_us, machine.hop_us) : 0) + best(limits.launch_us, machine.launch_us);
}

}  // namespace latent_moe
