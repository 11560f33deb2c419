// What `bench` found, as a table, as JSON, and as the worth of a whole step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/output.h"
#include "cli/problem.h"
#include "cli/rank_work.h"
#include "core/cost_model.h"
#include "core/machine.h"

namespace latent_moe::cli {

inline constexpr const char* product_row = "onednn-product";
inline constexpr int step_layers = 92;

struct BenchRow {
    std::string tail;
    std::string backend;
    bool external = false;
    InputState inputs = InputState::raw;
    bool dependent_launch = false;
    std::int64_t tokens = 0;
    int layers = 0;
    Timing timing;  ///< of one tail; where its inputs are fresh, producer and tail together less the producer alone
    double with_producer_us = 0;  ///< producer and tail together; 0 where there is none
    double producer_us = 0;       ///< the producer alone
    Work work;
    double floor_us = 0;
};

/// One tail's kernels in one pass over the layers.
struct TracedTail {
    std::string tail;
    std::int64_t tokens = 0;
    double launches = 0;  ///< of one rank, a tail
    std::optional<double> hidden_share;
};

struct BenchMemory {
    std::size_t at_start = 0;  ///< of the program, before the first tensor
    std::size_t peak = 0;      ///< while the tails ran
    std::size_t weights = 0;
    std::size_t activations = 0;

    std::size_t needed() const noexcept { return weights + activations; }
    double ratio() const noexcept;
};

struct RefusedRow {
    std::string tail;
    std::string reason;
};

struct BenchResult {
    std::string backend;
    Machine machine;
    std::vector<BenchRow> rows;
    std::vector<RefusedRow> refused;
    std::vector<TracedTail> traced;
    BenchMemory memory;
    std::string product_dtype;
    Status failure;  ///< what ended the run early; the rows before it stand

    void refuse(const std::string& tail, const std::string& reason);
};

/// What a step of 92 layers gains where the best row of ours replaces an external one.
struct StepGain {
    std::int64_t tokens = 0;
    std::string tail;
    std::string baseline;
    InputState inputs = InputState::raw;
    double tail_us = 0;      ///< of one layer
    double baseline_us = 0;  ///< of one layer
    double saved_ms = 0;     ///< of a step
    double tpot_ms = 0;      ///< with the baseline, as given; 0 if it is not known
    double candidate_tpot_ms() const noexcept { return tpot_ms - saved_ms; }
    double tokens_per_s() const noexcept { return static_cast<double>(tokens) * 1e3 / candidate_tpot_ms(); }
    double baseline_tokens_per_s() const noexcept { return static_cast<double>(tokens) * 1e3 / tpot_ms; }
    /// More tokens a second, of the baseline's.
    double percent() const noexcept { return 100 * (tpot_ms / candidate_tpot_ms() - 1); }
    /// Whether that makes sense: a TPOT is known, and a step of it is longer than what is saved.
    bool has_tpot() const noexcept { return candidate_tpot_ms() > 0; }
};

/// `tpot_ms`: none, one number, or one for each of `tokens`. Rows with fresh inputs are compared where there are any.
std::vector<StepGain> step_gains(const std::vector<BenchRow>& rows, const std::vector<std::int64_t>& tokens,
                                 const std::vector<double>& tpot_ms);

void print_bench(Output& output, const Arguments& arguments, const Problem& problem, const BenchResult& result);
Json bench_json(const Arguments& arguments, const Problem& problem, const BenchResult& result);

}  // namespace latent_moe::cli
