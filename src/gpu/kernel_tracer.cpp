#include "gpu/kernel_tracer.h"

#include <cxxabi.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <vector>

#ifdef LATENT_MOE_HAS_CUPTI
#include "gpu/runtime/cupti.h"
#endif
#include "latent_moe/status.h"

namespace latent_moe::gpu {

#ifndef LATENT_MOE_HAS_CUPTI

std::string why_no_trace() {
    return "this build has no tracer: it was built without cupti.h";
}

std::unique_ptr<KernelTrace> trace_kernels() {
    throw Error(StatusCode::unavailable, why_no_trace());
}

#else

namespace {

constexpr std::size_t buffer_bytes = std::size_t{4} << 20;

/// CUPTI's callbacks know of no object: what they deliver is collected here.
std::mutex mutex;
std::vector<KernelRun> collected;

void erase_all(std::string& text, std::string_view part) {
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at)) text.erase(at, part.size());
}

/// "one_stage<(Dtype)0, 8>" of the symbol's name.
std::string short_name(const char* symbol) {
    if (symbol == nullptr) return "unknown";
    int status = 0;
    char* demangled = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
    std::string text = demangled != nullptr ? demangled : symbol;
    std::free(demangled);
    for (const std::string_view part : {"(anonymous namespace)::", "latent_moe::gpu::", "latent_moe::", "void "})
        erase_all(text, part);
    if (!text.ends_with(')')) return text;
    int depth = 0;  // the parameters are of no interest
    for (std::size_t at = text.size(); at-- > 0;) {
        depth += text[at] == ')' ? 1 : text[at] == '(' ? -1 : 0;
        if (depth == 0 && at > 0) return text.substr(0, at);
    }
    return text;
}

bool is_all_reduce(std::string_view name) {
    constexpr std::array<std::string_view, 4> beginnings = {"one_stage", "two_stage", "ncclDevKernel_AllReduce", "ncclSymk"};
    return std::any_of(beginnings.begin(), beginnings.end(), [&](std::string_view each) { return name.starts_with(each); });
}

void CUPTIAPI give_buffer(std::uint8_t** buffer, std::size_t* size, std::size_t* most_records) {
    *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(64, buffer_bytes));
    *size = *buffer != nullptr ? buffer_bytes : 0;
    *most_records = 0;
}

void CUPTIAPI take_buffer(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t, std::size_t valid_bytes) {
    const std::lock_guard lock(mutex);
    CUpti_Activity* record = nullptr;
    while (cupti().ActivityGetNextRecord(buffer, valid_bytes, &record) == CUPTI_SUCCESS) {
        if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) continue;
        const auto& kernel = *reinterpret_cast<const CUpti_ActivityKernel10*>(record);
        KernelRun& run = collected.emplace_back();
        run.name = short_name(kernel.name);
        run.device = static_cast<int>(kernel.deviceId);
        run.stream = kernel.streamId;
        run.is_all_reduce = is_all_reduce(run.name);
        run.begin_us = static_cast<double>(kernel.start) / 1000;
        run.end_us = static_cast<double>(kernel.end) / 1000;
    }
    std::free(buffer);
}

class CuptiTrace final : public KernelTrace {
public:
    CuptiTrace() {
        const Cupti& api = cupti();
        check(api.ActivityRegisterCallbacks(&give_buffer, &take_buffer), "cuptiActivityRegisterCallbacks");
        check(api.ActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL), "cuptiActivityEnable");
    }
    ~CuptiTrace() override {
        static_cast<void>(cupti().ActivityDisable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL));
        static_cast<void>(cupti().ActivityFlushAll(0));
    }
    CuptiTrace(const CuptiTrace&) = delete;
    CuptiTrace& operator=(const CuptiTrace&) = delete;

    std::vector<KernelRun> take() override {
        check(cupti().ActivityFlushAll(0), "cuptiActivityFlushAll");
        std::vector<KernelRun> taken;
        const std::lock_guard lock(mutex);
        taken.swap(collected);
        std::sort(taken.begin(), taken.end(),
                  [](const KernelRun& a, const KernelRun& b) { return a.begin_us < b.begin_us; });
        return taken;
    }
};

}  // namespace

std::string why_no_trace() {
    return look_for_cupti().missing;
}

std::unique_ptr<KernelTrace> trace_kernels() {
    return std::make_unique<CuptiTrace>();
}

#endif

}  // namespace latent_moe::gpu
