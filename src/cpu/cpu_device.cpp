#include "cpu/cpu_device.h"

#include <fmt/format.h>

#include <chrono>
#include <cstring>
#include <new>
#include <utility>

#include "latent_moe/status.h"

namespace latent_moe {
namespace {

class CpuRecording final : public Recording {
public:
    explicit CpuRecording(std::function<void()> body) : body_(std::move(body)) {}
    void replay() override { body_(); }

private:
    std::function<void()> body_;
};

class CpuDevice final : public Device {
public:
    void* allocate(std::size_t bytes) override {
        void* memory = ::operator new(bytes, alignment, std::nothrow);
        if (memory == nullptr) {
            throw Error(StatusCode::out_of_memory,
                        fmt::format("cannot allocate {:.1f} MB", static_cast<double>(bytes) / 1e6));
        }
        return memory;
    }
    void release(void* memory) noexcept override { ::operator delete(memory, alignment); }
    void upload(void* to, const void* from, std::size_t bytes) override { copy(to, from, bytes); }
    void download(void* to, const void* from, std::size_t bytes) override { copy(to, from, bytes); }

    Stream stream() const noexcept override { return nullptr; }
    void synchronize() override {}

    std::unique_ptr<Recording> record(std::function<void()> body) override {
        return std::make_unique<CpuRecording>(std::move(body));
    }
    double time_us(Recording& recording) override {
        const auto begin = std::chrono::steady_clock::now();
        recording.replay();
        return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
    }

private:
    static constexpr std::align_val_t alignment{256};

    static void copy(void* to, const void* from, std::size_t bytes) noexcept {
        if (bytes != 0) std::memcpy(to, from, bytes);
    }
};

}  // namespace

std::unique_ptr<Device> make_cpu_device() {
    return std::make_unique<CpuDevice>();
}

}  // namespace latent_moe
