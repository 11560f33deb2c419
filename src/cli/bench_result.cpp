#include "cli/bench_result.h"

#include <algorithm>
#include <thread>

#include "cpu/cpu_model.h"

namespace latent_moe::cli {
namespace {

/// The fastest of the rows that `wanted` names, for so many tokens.
template <typename Wanted>
const BenchRow* fastest(const std::vector<BenchRow>& rows, std::int64_t tokens, InputState inputs, Wanted wanted) {
    const BenchRow* best = nullptr;
    for (const BenchRow& row : rows) {
        if (row.tokens != tokens || row.inputs != inputs || !wanted(row)) continue;
        if (best == nullptr || row.timing.median_us < best->timing.median_us) best = &row;
    }
    return best;
}

void print_rows(Output& output, const std::vector<BenchRow>& rows) {
    Table table({"<tail", "<inputs", "<early", "tokens", "layers", "median us", "p10 us", "p90 us", "with producer us",
                 "repeats", "weights+act MB", "wire MB", "floor us", "x floor"});
    for (const BenchRow& row : rows) {
        table.row({row.tail, name(row.inputs), row.dependent_launch ? "yes" : "no", fmt::format("{}", row.tokens),
                   fmt::format("{}", row.layers), us_text(row.timing.median_us), us_text(row.timing.p10_us),
                   us_text(row.timing.p90_us), row.with_producer_us > 0 ? us_text(row.with_producer_us) : "-",
                   fmt::format("{}", row.timing.repeats),
                   fmt::format("{:.2f}", (row.work.weight_bytes + row.work.activation_bytes) / 1e6),
                   fmt::format("{:.3f}", row.work.wire_bytes / 1e6), us_text(row.floor_us),
                   fmt::format("{:.2f}", row.timing.median_us / row.floor_us)});
    }
    output.table(table);
}

/// `timed`: the layers that one recording had, by which a tail's time was measured.
std::string step_text(int timed) {
    const std::string step = fmt::format("a step of {} layers", step_layers);
    return timed == step_layers ? step : fmt::format("{}, by the time of a tail among {}", step, timed);
}

void print_step(Output& output, const std::vector<StepGain>& gains, int layers) {
    Table table({"<tail", "<instead of", "<inputs", "tokens", "us a layer", "instead of us", "saved ms a step", "TPOT ms",
                 "before", "tokens/s", "before", "%"});
    for (const StepGain& gain : gains) {
        const bool known = gain.has_tpot();
        const auto if_known = [&](double value) { return known ? fmt::format("{:.2f}", value) : std::string("-"); };
        table.row({gain.tail, gain.baseline, name(gain.inputs), fmt::format("{}", gain.tokens), us_text(gain.tail_us),
                   us_text(gain.baseline_us), fmt::format("{:.3f}", gain.saved_ms), if_known(gain.candidate_tpot_ms()),
                   if_known(gain.tpot_ms), if_known(gain.tokens_per_s()), if_known(gain.baseline_tokens_per_s()),
                   if_known(gain.percent())});
    }
    output.line("{}:", step_text(layers));
    output.table(table);
}

}  // namespace

double BenchMemory::ratio() const noexcept {
    return static_cast<double>(peak - at_start) / static_cast<double>(std::max<std::size_t>(needed(), 1));
}

void BenchResult::refuse(const std::string& tail, const std::string& reason) {
    const auto same = [&](const RefusedRow& other) { return other.tail == tail; };
    if (std::none_of(refused.begin(), refused.end(), same)) refused.push_back({tail, reason});
}

std::vector<StepGain> step_gains(const std::vector<BenchRow>& rows, const std::vector<std::int64_t>& tokens,
                                 const std::vector<double>& tpot_ms) {
    std::vector<StepGain> gains;
    const bool fresh =
        std::any_of(rows.begin(), rows.end(), [](const BenchRow& row) { return row.inputs == InputState::fresh_late; });
    const InputState inputs = fresh ? InputState::fresh_late : InputState::raw;
    for (std::size_t at = 0; at < tokens.size(); ++at) {
        const BenchRow* ours =
            fastest(rows, tokens[at], inputs, [](const BenchRow& row) { return !row.external && row.tail != product_row; });
        if (ours == nullptr) continue;
        for (const BenchRow& row : rows) {
            if (!row.external || row.tokens != tokens[at] || row.inputs != inputs) continue;
            StepGain gain{.tokens = tokens[at],
                          .tail = ours->tail,
                          .baseline = row.tail,
                          .inputs = inputs,
                          .tail_us = ours->timing.median_us,
                          .baseline_us = row.timing.median_us};
            gain.saved_ms = (gain.baseline_us - gain.tail_us) * step_layers / 1e3;
            if (!tpot_ms.empty()) gain.tpot_ms = tpot_ms[std::min(at, tpot_ms.size() - 1)];
            gains.push_back(gain);
        }
    }
    return gains;
}

void print_bench(Output& output, const Arguments& arguments, const Problem& problem, const BenchResult& result) {
    output.line("{}; {} {}, backend {}", shape_text(problem.shape), problem.world,
                arguments.processes ? "processes" : "threads", result.backend);
    output.line("machine: {}, {} cores; floors from the constants of {}", cpu_model(), std::thread::hardware_concurrency(),
                result.machine.description);
    print_rows(output, result.rows);
    if (!result.product_dtype.empty()) {
        for (const BenchRow& row : result.rows) {
            const BenchRow* product = fastest(result.rows, row.tokens, InputState::raw,
                                              [](const BenchRow& other) { return other.tail == product_row; });
            if (row.tail != name(Tail::column_parallel) || product == nullptr) continue;
            output.line("column_parallel takes {:.2f} times {} at {} tokens",
                        row.timing.median_us / product->timing.median_us, product_row, row.tokens);
        }
        output.line("{}: oneDNN's product of one rank's shard alone, all ranks at once, {} weights in its own layout",
                    product_row, result.product_dtype);
    }
    if (arguments.step) {
        const std::vector<StepGain> gains = step_gains(result.rows, problem.tokens, arguments.tpot_ms);
        const int layers = result.rows.empty() ? step_layers : result.rows.front().layers;
        if (gains.empty()) {
            output.line("{}: no row of another library was timed beside ours", step_text(layers));
        } else {
            print_step(output, gains, layers);
        }
    }
    for (const TracedTail& traced : result.traced) {
        output.line("traced: {} at {} tokens: {:.2f} launches a tail{}", traced.tail, traced.tokens, traced.launches,
                    traced.hidden_share
                        ? fmt::format(", {:.1f}% of the all-reduces beside other kernels", *traced.hidden_share * 100)
                        : "");
    }
    for (const RefusedRow& refusal : result.refused) output.line("refused: {}: {}", refusal.tail, refusal.reason);
    const BenchMemory& memory = result.memory;
    output.line("memory: peak {} above the {} at start, {:.2f} x the {} of weights and {} of activations{}",
                bytes_text(static_cast<double>(memory.peak - memory.at_start)),
                bytes_text(static_cast<double>(memory.at_start)), memory.ratio(),
                bytes_text(static_cast<double>(memory.weights)), bytes_text(static_cast<double>(memory.activations)),
                arguments.processes ? " (rank 0's process)" : "");
}

Json bench_json(const Arguments& arguments, const Problem& problem, const BenchResult& result) {
    const BenchMemory& memory = result.memory;
    Json json = {{"schema", "latent-moe/bench/1"},
                 {"shape",
                  {{"hidden", problem.shape.hidden},
                   {"latent", problem.shape.latent},
                   {"norm", problem.shape.norm == Norm::none ? "none" : "rms"},
                   {"dtype", name(problem.shape.activations)},
                   {"prefix", !arguments.no_prefix}}},
                 {"ranks", arguments.processes ? "processes" : "threads"},
                 {"machine",
                  {{"cpu", cpu_model()},
                   {"cores", std::thread::hardware_concurrency()},
                   {"constants", result.machine.description},
                   {"memory_bytes_per_us", result.machine.memory_bytes_per_us},
                   {"flops_per_us", result.machine.flops_per_us},
                   {"wire_bytes_per_us", result.machine.wire_bytes_per_us},
                   {"hop_us", result.machine.hop_us},
                   {"launch_us", result.machine.launch_us},
                   {"best",
                    {{"flops_per_us", result.machine.best.flops_per_us},
                     {"wire_bytes_per_us", result.machine.best.wire_bytes_per_us},
                     {"hop_us", result.machine.best.hop_us},
                     {"launch_us", result.machine.best.launch_us}}}}},
                 {"rows", Json::array()}};
    for (const BenchRow& row : result.rows) {
        Json each = {{"tail", row.tail},
                     {"backend", row.backend},
                     {"tp", problem.world},
                     {"tokens", row.tokens},
                     {"layers", row.layers},
                     {"inputs", name(row.inputs)},
                     {"dependent_launch", row.dependent_launch},
                     {"external", row.external},
                     {"median_us", row.timing.median_us},
                     {"p10_us", row.timing.p10_us},
                     {"p90_us", row.timing.p90_us},
                     {"spread", (row.timing.p90_us - row.timing.p10_us) / row.timing.median_us},
                     {"repeats", row.timing.repeats},
                     {"hbm_bytes", row.work.weight_bytes + row.work.activation_bytes},
                     {"wire_bytes", row.work.wire_bytes},
                     {"floor_us", row.floor_us},
                     {"ratio_to_floor", row.timing.median_us / row.floor_us}};
        if (row.inputs != InputState::raw) {
            each["with_producer_us"] = row.with_producer_us;
            each["producer_us"] = row.producer_us;
        }
        json["rows"].push_back(std::move(each));
    }
    json["refused"] = Json::array();
    for (const RefusedRow& refusal : result.refused)
        json["refused"].push_back({{"tail", refusal.tail}, {"reason", refusal.reason}});
    if (arguments.step) {
        json["step"] = {{"layers", step_layers}, {"gains", Json::array()}};
        for (const StepGain& gain : step_gains(result.rows, problem.tokens, arguments.tpot_ms)) {
            Json each = {{"tokens", gain.tokens},       {"tail", gain.tail},       {"baseline", gain.baseline},
                         {"inputs", name(gain.inputs)}, {"tail_us", gain.tail_us}, {"baseline_us", gain.baseline_us},
                         {"saved_ms", gain.saved_ms}};
            if (gain.has_tpot()) {
                each["baseline_tpot_ms"] = gain.tpot_ms;
                each["tpot_ms"] = gain.candidate_tpot_ms();
                each["baseline_tokens_per_s"] = gain.baseline_tokens_per_s();
                each["tokens_per_s"] = gain.tokens_per_s();
                each["percent"] = gain.percent();
            }
            json["step"]["gains"].push_back(std::move(each));
        }
    }
    if (arguments.trace) {
        json["traced"] = Json::array();
        for (const TracedTail& traced : result.traced) {
            json["traced"].push_back(
                {{"tail", traced.tail}, {"tokens", traced.tokens}, {"launches_per_tail", traced.launches}});
            if (traced.hidden_share) json["traced"].back()["hidden_share"] = *traced.hidden_share;
        }
    }
    if (!result.failure.ok()) json["failure"] = result.failure.message();
    json["memory"] = {{"at_start_bytes", memory.at_start},
                      {"peak_bytes", memory.peak},
                      {"weight_bytes", memory.weights},
                      {"activation_bytes", memory.activations},
                      {"ratio", memory.ratio()}};
    return json;
}

}  // namespace latent_moe::cli
