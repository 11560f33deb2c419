#include "core/cost_model.h"

#include <algorithm>
#include <cmath>

namespace latent_moe {
namespace {

constexpr double tile_columns = 128;  ///< of the fused tail's product

/// The quantities that the formulas are written in, named as in docs/cost-model.md.
class Terms {
public:
    Terms(const CostedCall& call, const Machine& machine) : call_(call), machine_(machine) {}

    double rows() const noexcept { return static_cast<double>(call_.tokens); }
    double ranks() const noexcept { return call_.world; }
    /// (R − 1) / R: what of b bytes a rank sends in a reduce-scatter or an all-gather. An all-reduce is one of each.
    double part() const noexcept { return (ranks() - 1) / ranks(); }
    double latents() const noexcept { return rows() * static_cast<double>(call_.shape.latent) * element(); }
    double hiddens() const noexcept { return rows() * static_cast<double>(call_.shape.hidden) * element(); }
    /// Hidden rows of the shared partial that the ranks still have to sum.
    double summands() const noexcept { return call_.reduces_shared() ? hiddens() : 0; }

    /// Operations one after another.
    double launches(double count) const noexcept { return count * machine_.launch_us; }
    /// The same, where each starts before its predecessor ends.
    double early_launches(double count) const noexcept { return launches(count) * machine_.reached.early_launch; }
    /// One-way trips that wait for one another.
    double hops(double count) const noexcept { return call_.world > 1 ? count * machine_.hop_us : 0; }
    /// Exchanges one after another: there and back.
    double exchanges(double count) const noexcept {
        return call_.world > 1 ? count * machine_.collective_us + hops(2 * count) : 0;
    }
    double wire(double bytes, double reached) const noexcept { return bytes / (reached * machine_.wire_bytes_per_us); }
    /// What goes on side by side takes from one another.
    double together(double a, double b, double c = 0) const noexcept {
        const double longest = std::max({a, b, c});
        return longest + machine_.reached.contention * (a + b + c - longest);
    }
    /// `tokens` rows times this share of W_up's rows.
    double product(double share, double tokens) const noexcept {
        const auto hidden = static_cast<double>(call_.shape.hidden);
        const auto latent = static_cast<double>(call_.shape.latent);
        const double weights = hidden * latent * share * call_.weight_element_bytes;
        const double activations = tokens * (latent + 2 * hidden * share) * element();
        return together((weights + activations) / machine_.memory_bytes_per_us,
                        2 * tokens * hidden * latent * share / machine_.flops_per_us);
    }
    /// Whether the fused tail sums the latents once a device.
    bool pools() const noexcept { return call_.tokens >= machine_.reached.pooled_from_tokens; }
    /// Every tile of the rank's columns reads the latents: their sum, or those of every rank.
    double gathering() const noexcept {
        const double tiles = std::ceil(static_cast<double>(call_.shape.hidden) / ranks() / tile_columns);
        return tiles * (pools() ? 1 : ranks()) * latents() / (machine_.reached.gathering * machine_.memory_bytes_per_us);
    }

private:
    double element() const noexcept { return static_cast<double>(bytes_of(call_.shape.activations)); }

    const CostedCall& call_;
    const Machine& machine_;
};

}  // namespace

Work work_of(Tail tail, const CostedCall& call) {
    const Machine any;
    const Terms terms(call, any);
    const auto weights = static_cast<double>(call.shape.hidden) * static_cast<double>(call.shape.latent);
    const double latents = terms.latents();
    const double hiddens = terms.hiddens();
    Work work{.weight_bytes = weights * call.weight_element_bytes,
              .activation_bytes = 3 * (latents + hiddens),
              .flops = 2 * terms.rows() * weights};
    const double sent_before = terms.part() * terms.summands();  // of the shared partial, to those who sum it
    switch (tail) {
        case Tail::replicated:
        case Tail::overlap: work.wire_bytes = 2 * terms.part() * latents + 2 * sent_before; break;
        case Tail::column_parallel:
            work.weight_bytes /= call.world;
            work.flops /= call.world;
            work.wire_bytes = terms.part() * (2 * latents + hiddens) + sent_before;
            break;
        case Tail::token_parallel:
            work.activation_bytes /= call.world;
            work.flops /= call.world;
            work.wire_bytes = terms.part() * (latents + hiddens) + sent_before;
            break;
        case Tail::late_reduce: work.wire_bytes = 2 * terms.part() * hiddens; break;
        case Tail::fused:
            // Every rank gets every latent partial; shared slices go to their owners and finished columns to everyone.
            work.weight_bytes /= call.world;
            work.flops /= call.world;
            work.wire_bytes = (terms.ranks() - 1) * latents + terms.part() * hiddens + sent_before;
            break;
    }
    return work;
}

double expected_us(Tail tail, const CostedCall& call, const Machine& machine) noexcept {
    const Terms t(call, machine);
    const Machine::Reached& reached = machine.reached;
    const double wire_bytes = work_of(tail, call).wire_bytes;
    const double shared = call.reduces_shared() ? 1 : 0;
    switch (tail) {
        case Tail::replicated:
            return t.launches(2 + shared) + t.exchanges(1 + shared) + t.product(1, t.rows()) +
                   t.wire(wire_bytes, reached.all_reduce);
        case Tail::overlap: {
            const double side = 2 * t.part() * t.summands();
            return t.launches(3) + t.exchanges(1) + shared * machine.collective_us +
                   t.wire(wire_bytes - side, reached.all_reduce) +
                   t.together(t.product(1, t.rows()), t.wire(side, reached.side_lane));
        }
        case Tail::column_parallel: {
            const bool early = call.tokens <= reached.early_tokens;
            return (early ? t.early_launches(3) : t.launches(3)) + t.exchanges(2) + t.product(1 / t.ranks(), t.rows()) +
                   t.wire(wire_bytes, 1);
        }
        case Tail::token_parallel:
            return t.launches(3 + shared) + t.exchanges(2 + shared) + t.product(1, t.rows() / t.ranks()) +
                   t.wire(wire_bytes, reached.scatter_gather);
        case Tail::late_reduce:
            return t.launches(2) + t.exchanges(1) + t.product(1, t.rows()) + t.wire(wire_bytes, reached.all_reduce);
        case Tail::fused:
            // The first hop passes under the weights, that of the pool under those that a part of the latents is enough
            // for; what comes last is the hop of the finished columns.
            return (call.starts_early ? t.early_launches(1) : t.launches(1)) + t.hops(1) +
                   t.together(t.product(1 / t.ranks(), t.rows()), t.gathering(), t.wire(wire_bytes, 1));
    }
    return 0;
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
