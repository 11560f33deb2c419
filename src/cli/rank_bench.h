// One rank's part of `bench`.
//
// A repetition is one call on each of several layers with weights of their own, so that weights come from memory, not from a
// cache, and inputs take turns. Ranks start together and the slowest one counts. Where inputs are fresh, a producer kernel
// writes them in front of every call; the figure is producer and tail together less the producer alone.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cli/bench_result.h"
#include "cli/output.h"
#include "cli/rank_work.h"
#include "core/planner.h"
#include "tails/external.h"
#include "tails/kernel_trace.h"

namespace latent_moe::cli {

/// As many layers as are wanted and as fit beside everything else.
std::vector<std::int64_t> layers_that_fit(Problem& problem, int wanted);

class RankBench {
public:
    /// Collective.
    RankBench(const Arguments& arguments, Problem& problem, const Bootstrap& bootstrap,
              const std::vector<std::int64_t>& layers, Progress& progress);
    ~RankBench();

    /// Each tail once; then the memory is what the tails need.
    void warm_up(BenchResult& result);
    /// All that run so many tokens, side by side.
    void time(std::int64_t tokens, BenchResult& result);
    const Context& context() const noexcept { return context_; }
    const Capabilities& capabilities() const noexcept { return capabilities_; }

    /// The kernels of one pass of each tail, of all ranks' processes; of a pass after those that were timed.
    void trace(BenchResult& result, std::vector<KernelRun>& kernels);

private:
    /// A row to be: what is timed, and how it is told.
    struct Contestant {
        BenchRow row;
        Turns turns;
        int producer = -1;  ///< which contestant is its producer alone
    };

    /// What calls on one kind of memory read and write.
    struct Buffers {
        std::vector<RankInputs> sets;      ///< take turns
        std::unique_ptr<RankInputs> live;  ///< what a producer writes
        DeviceTensor out;
    };

    void add_layers(const std::vector<std::int64_t>& layers);
    Buffers make_buffers(Memory& memory);
    /// So many that inputs which would not stay in a cache until they are read do not stay in it here.
    int sets_for(std::int64_t tokens) const;
    std::vector<InputState> states() const;

    void enqueue_producer(InputState state, Buffers& buffers, int set, std::int64_t tokens);
    /// Passes over all layers, each with the inputs in another turn. `run` enqueues one call.
    template <typename Run>
    Turns passes(InputState state, Buffers& buffers, std::int64_t tokens, Run run);
    Turns passes_of(Tail tail, InputState state, bool dependent_launch, std::int64_t tokens);
    Turns passes_of(ExternalTail& tail, InputState state, std::int64_t tokens);
    Turns producer_alone(InputState state, std::int64_t tokens);

    std::vector<Contestant> contestants(std::int64_t tokens, BenchResult& result);
    void require_same_answer(ExternalTail& tail, std::int64_t tokens);
    void add_external(std::int64_t tokens, std::vector<Contestant>& all, BenchResult& result);
    CostedCall costed(std::int64_t tokens) const;
    BenchRow row(std::string tail, std::string backend, InputState state, std::int64_t tokens, const Work& work) const;
    std::unique_ptr<class OnednnProduct> make_product(std::int64_t tokens) const;
    void require_no_fault() const;

    const Arguments& arguments_;
    Problem& problem_;
    const Bootstrap& bootstrap_;
    Progress& progress_;
    std::unique_ptr<Device> device_;
    Context context_;
    Capabilities capabilities_;
    std::unique_ptr<ExternalTails> external_;
    Buffers own_;
    std::map<Memory*, Buffers> others_;
};

}  // namespace latent_moe::cli
