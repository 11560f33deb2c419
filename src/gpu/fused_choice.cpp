#include "gpu/fused_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>

#include "gpu/collective_setup.h"
#include "gpu/runtime/check.h"
#include "gpu/runtime/resources.h"

namespace latent_moe::gpu {
namespace {

constexpr int most_cuts = 11;
constexpr int other_cuts = 3;  ///< with an order of sums of their own
constexpr int calls = 16;      ///< of a burst, behind one that lines the ranks up
constexpr int bursts = 5;      ///< of each cut, in turns; the median counts

/// What ranks compare before they run anything.
struct Trials {
    int count = 0;
    std::array<FusedTailPlan, most_cuts> plans{};
    bool operator==(const Trials&) const = default;
};

struct Times {
    std::array<double, most_cuts> us{};
};

double median(std::array<double, bursts> times) {
    std::ranges::nth_element(times, times.begin() + bursts / 2);
    return times[bursts / 2];
}

}  // namespace

std::string name_of(const FusedTailPlan& plan) {
    return fmt::format(
        "{} rows, K in {}, {} clusters and {} that receive, {} to {} copies in flight, {} blocks prefetched, ring of {}",
        plan.rows, plan.split, plan.clusters, plan.receivers, plan.in_flight_early, plan.in_flight_late,
        plan.prefetch_blocks, plan.token_ring);
}

std::vector<FusedTailPlan> cuts_to_try(const FusedTailShape& shape, std::int64_t tokens, int max_ctas,
                                       const FusedTailPlan& estimated) {
    std::vector<FusedTailPlan> plans = {estimated};
    const auto add = [&](const FusedTailPlan& plan) {
        const bool known = std::ranges::find(plans, plan) != plans.end();
        if (!known && plans.size() < most_cuts && fused_tail_fits(shape, plan) == cudaSuccess) plans.push_back(plan);
        static_cast<void>(cudaGetLastError());
    };
    std::vector<FusedTailPlan> cuts;
    if (fused_tail_plans(shape, tokens, max_ctas, estimated.float8, &cuts) == cudaSuccess) {
        int taken = 0;
        for (FusedTailPlan& cut : cuts) {
            if (fused_tail_grid(cut) > fused_tail_grid(estimated)) cut.receivers = 0;
            if (cut == estimated || fused_tail_grid(cut) > fused_tail_grid(estimated) || cut.tokens != estimated.tokens)
                continue;
            if (taken++ == other_cuts) break;
            add(cut);
        }
    }
    for (const int early : {1, 2, 3, 5}) {
        FusedTailPlan plan = estimated;
        plan.in_flight_early = early;
        add(plan);
    }
    FusedTailPlan plan = estimated;
    plan.prefetch_blocks = 0;
    add(plan);
    plan = estimated;
    plan.receivers = 0;
    add(plan);
    plan = estimated;
    plan.token_ring = estimated.token_ring / 2 * 3;
    add(plan);
    return plans;
}

std::vector<MeasuredCut> measure_cuts(const Bootstrap& bootstrap, const std::vector<FusedTailPlan>& plans,
                                      FunctionRef<void(const FusedTailPlan&, int)> run, cudaStream_t stream) {
    Trials mine{.count = static_cast<int>(std::min<std::size_t>(plans.size(), most_cuts))};
    std::copy_n(plans.begin(), mine.count, mine.plans.begin());
    const std::vector<Trials> all = gather(bootstrap, mine);
    if (std::ranges::any_of(all, [&](const Trials& rank) { return rank != mine; })) return {{plans.front(), 0}};

    Times times;
    together(bootstrap, "choice of the fused tail's cut", [&] {
        const Event begin = make_event(true);
        const Event end = make_event(true);
        std::array<std::array<double, bursts>, most_cuts> found{};
        int turn = 0;
        for (int burst = -1; burst < bursts; ++burst) {  // the first one loads the kernels
            for (int at = 0; at < mine.count; ++at) {
                const FusedTailPlan& plan = mine.plans[static_cast<std::size_t>(at)];
                run(plan, turn++);
                check(cudaEventRecord(begin.get(), stream), "cudaEventRecord");
                for (int call = 0; call < calls; ++call) run(plan, turn++);
                check(cudaEventRecord(end.get(), stream), "cudaEventRecord");
                check(cudaEventSynchronize(end.get()), "fused tail kernel");
                float ms = 0;
                check(cudaEventElapsedTime(&ms, begin.get(), end.get()), "cudaEventElapsedTime");
                if (burst >= 0)
                    found[static_cast<std::size_t>(at)][static_cast<std::size_t>(burst)] = double{ms} * 1000 / calls;
            }
        }
        std::ranges::transform(found, times.us.begin(), median);
    });

    std::vector<MeasuredCut> measured;
    const std::vector<Times> of_ranks = gather(bootstrap, times);
    for (std::size_t at = 0; at < static_cast<std::size_t>(mine.count); ++at) {
        double slowest = 0;
        for (const Times& rank : of_ranks) slowest = std::max(slowest, rank.us[at]);
        measured.push_back({mine.plans[at], slowest});
    }
    const auto fastest = std::ranges::min_element(measured, {}, &MeasuredCut::us);
    if (fastest->us < measured.front().us * (1 - worth_changing)) std::rotate(measured.begin(), fastest, fastest + 1);
    return measured;
}

}  // namespace latent_moe::gpu
