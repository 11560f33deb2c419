#include "gpu/gpu_device.h"

#include <fmt/format.h>

#include <utility>

#include "gpu/kernels/producer.h"
#include "gpu/runtime/resources.h"
#include "gpu/topology.h"

namespace latent_moe::gpu {
namespace {

struct GraphKind {
    using Handle = cudaGraph_t;
    static void release(Handle graph) { static_cast<void>(cudaGraphDestroy(graph)); }
};
struct ExecutableKind {
    using Handle = cudaGraphExec_t;
    static void release(Handle graph) { static_cast<void>(cudaGraphExecDestroy(graph)); }
};

class GpuRecording final : public Recording {
public:
    GpuRecording(int device, cudaStream_t stream, const std::function<void()>& body) : device_(device), stream_(stream) {
        const CurrentDevice current(device_);
        check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        cudaGraph_t graph = nullptr;
        try {
            body();
        } catch (...) {
            static_cast<void>(cudaStreamEndCapture(stream_, &graph));
            graph_ = Owned<GraphKind>(graph);
            throw;
        }
        check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
        graph_ = Owned<GraphKind>(graph);
        cudaGraphExec_t executable = nullptr;
        check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
        executable_ = Owned<ExecutableKind>(executable);
        check(cudaGraphUpload(executable, stream_), "cudaGraphUpload");
    }

    void replay() override {
        const CurrentDevice current(device_);
        check(cudaGraphLaunch(executable_.get(), stream_), "cudaGraphLaunch");
    }

private:
    int device_;
    cudaStream_t stream_;
    Owned<GraphKind> graph_;
    Owned<ExecutableKind> executable_;
};

class GpuDevice final : public Device {
public:
    explicit GpuDevice(int device) : device_(device) {
        const CurrentDevice current(device_);
        stream_ = gpu::make_stream();
        begin_ = make_event(true);
        end_ = make_event(true);
        check(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device_), "cudaDeviceGetAttribute");
        check(cudaDeviceGetAttribute(&clock_khz_, cudaDevAttrClockRate, device_), "cudaDeviceGetAttribute");
        check(prepare_producers(), "cudaFuncSetAttribute");
    }

    void* allocate(std::size_t bytes) override {
        const CurrentDevice current(device_);
        void* memory = nullptr;
        if (const cudaError_t error = cudaMalloc(&memory, bytes == 0 ? 1 : bytes); error != cudaSuccess) {
            fail(error, fmt::format("cudaMalloc of {:.1f} MB", static_cast<double>(bytes) / 1e6));
        }
        return memory;
    }
    void release(void* memory) noexcept override { static_cast<void>(cudaFree(memory)); }

    void upload(void* to, const void* from, std::size_t bytes) override { copy(to, from, bytes); }
    void download(void* to, const void* from, std::size_t bytes) override { copy(to, from, bytes); }

    latent_moe::Stream stream() const noexcept override { return stream_.get(); }
    void synchronize() override { check(cudaStreamSynchronize(stream_.get()), "work on the GPU"); }

    std::unique_ptr<Recording> record(std::function<void()> body) override {
        return std::make_unique<GpuRecording>(device_, stream_.get(), body);
    }

    std::size_t used_bytes() override {
        const CurrentDevice current(device_);
        std::size_t free = 0;
        std::size_t all = 0;
        check(cudaMemGetInfo(&free, &all), "cudaMemGetInfo");
        return all - free;
    }

    bool has_producers() const noexcept override { return true; }
    void produce(Producer how, std::span<const FreshInput> inputs) override {
        if (inputs.size() > most_produced) {
            throw Error(StatusCode::unsupported,
                        fmt::format("{} inputs to produce, expected at most {}", inputs.size(), most_produced));
        }
        const float busy_us = how == Producer::cooperating ? 6.0F : 2.0F;
        Produce op{.count = static_cast<int>(inputs.size()),
                   .triggers_early = how != Producer::late,
                   .leaves_room = how == Producer::cooperating,
                   .least_clocks = static_cast<int>(busy_us * static_cast<float>(clock_khz_) / 1000),
                   .multiprocessors = multiprocessors_};
        for (std::size_t i = 0; i < inputs.size(); ++i) op.pieces[i] = {inputs[i].to, inputs[i].from, inputs[i].bytes};
        const CurrentDevice current(device_);
        check(gpu::produce(op, stream_.get()), "producer kernel");
    }

    double time_us(Recording& recording) override {
        const CurrentDevice current(device_);
        recording.replay();
        check(cudaEventRecord(begin_.get(), stream_.get()), "cudaEventRecord");
        recording.replay();
        check(cudaEventRecord(end_.get(), stream_.get()), "cudaEventRecord");
        check(cudaEventSynchronize(end_.get()), "work on the GPU");
        float ms = 0;
        check(cudaEventElapsedTime(&ms, begin_.get(), end_.get()), "cudaEventElapsedTime");
        return static_cast<double>(ms) * 1000;
    }

private:
    void copy(void* to, const void* from, std::size_t bytes) {
        if (bytes == 0) return;
        check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_.get()), "cudaMemcpyAsync");
        check(cudaStreamSynchronize(stream_.get()), "cudaMemcpyAsync");
    }

    int device_;
    int multiprocessors_ = 0;
    int clock_khz_ = 0;
    gpu::Stream stream_;
    Event begin_;
    Event end_;
};

}  // namespace

std::unique_ptr<Device> make_gpu_device(const Bootstrap& bootstrap, const Options& options) {
    return std::make_unique<GpuDevice>(device_of(options, bootstrap.rank));
}

}  // namespace latent_moe::gpu
