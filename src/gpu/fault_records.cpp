#include "gpu/fault_records.h"

#include <fmt/format.h>

#include <array>
#include <atomic>

namespace latent_moe::gpu {
namespace {

constexpr std::array<const char*, FaultRecords::lanes> lane_names = {"main lane", "side lane", "fused tail", "self-check"};

const char* what(Phase phase) noexcept {
    switch (phase) {
        case Phase::none: return "a call";
        case Phase::header_tokens: return "tokens";
        case Phase::header_tail: return "the tail";
        case Phase::header_layer: return "the layer";
        case Phase::header_digest: return "the digest of the previous output";
        case Phase::header: return "the header";
        case Phase::gather: return "the gather";
        case Phase::scatter: return "the scatter";
        case Phase::combine: return "the combining";
        case Phase::self_check_weights: return "its packed weights";
        case Phase::self_check_output: return "its output";
    }
    return "a call";
}

}  // namespace

FaultRecords::FaultRecords(int rank, int timeout_ms)
    : rank_(rank), timeout_ms_(timeout_ms), memory_(sizeof(Memory), "fault records"), abort_stream_(make_stream(true)) {
    memory()->abort_word = abort_word(rank);
}

Status FaultRecords::poll() const {
    for (int lane = 0; lane < lanes; ++lane) {
        FaultRecord& record = memory()->records[lane];
        // The device writes the code last, after a fence.
        const auto code = static_cast<FaultCode>(std::atomic_ref(record.code).load(std::memory_order_acquire));
        if (code == FaultCode::none) continue;
        const auto phase = static_cast<Phase>(record.phase);
        const std::string where = fmt::format("layer {}, exchange {} of the {}", record.layer, record.call,
                                              lane_names[static_cast<std::size_t>(lane)]);
        switch (code) {
            case FaultCode::timeout:
                return {StatusCode::timeout, fmt::format("rank {} did not arrive within {} ms at {} ({})", record.rank,
                                                         timeout_ms_, what(phase), where)};
            case FaultCode::mismatch:
                if (phase == Phase::self_check_weights || phase == Phase::self_check_output) {
                    return {StatusCode::mismatch,
                            fmt::format("rank {}: self-check: {} is not as expected ({})", record.rank, what(phase), where)};
                }
                if (record.expected == record.found) {  // reported by the peer, which holds the numbers
                    return {StatusCode::mismatch,
                            fmt::format("rank {} found that ranks differ in {} ({})", record.rank, what(phase), where)};
                }
                return {StatusCode::mismatch, fmt::format("rank {} and rank {} differ in {}: {} here, {} there ({})", rank_,
                                                          record.rank, what(phase), record.expected, record.found, where)};
            default:
                return {StatusCode::aborted, fmt::format("rank {} aborted at {} ({})", record.rank, what(phase), where)};
        }
    }
    return {};
}

void FaultRecords::abort(void* base) noexcept {
    // Allowed whatever another thread captures.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
    static_cast<void>(cudaMemcpyAsync(&static_cast<Control*>(base)->fault, &memory()->abort_word, sizeof(std::uint32_t),
                                      cudaMemcpyHostToDevice, abort_stream_.get()));
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
}

}  // namespace latent_moe::gpu
