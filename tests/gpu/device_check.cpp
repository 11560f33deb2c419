// What `bench` relies on of a GPU's `Device`, on one GPU: producers write what they are told, recordings replay, a clock
// runs.
//
//     device_check
#include <cstdio>
#include <cstring>
#include <span>
#include <vector>

#include "gpu/gpu_device.h"
#include "gpu/machine.h"
#include "latent_moe/status.h"

namespace latent_moe {
namespace {

int failures = 0;

void report(const char* what, bool right) {
    std::printf("%-70s %s\n", what, right ? "ok" : "FAIL");
    if (!right) ++failures;
}

/// Two pieces of so many bytes, and whether they arrive whole with nothing written behind them.
bool produces(Device& device, Producer how, std::size_t first, std::size_t second) {
    constexpr std::size_t guard = 64;
    const std::size_t sizes[] = {first, second};
    std::vector<std::vector<unsigned char>> sources;
    std::vector<FreshInput> pieces;
    for (const std::size_t size : sizes) {
        std::vector<unsigned char> source(size + guard);
        for (std::size_t at = 0; at < source.size(); ++at) source[at] = static_cast<unsigned char>(at * 31 + size % 97 + 1);
        void* from = device.allocate(source.size());
        void* to = device.allocate(source.size());
        device.upload(from, source.data(), source.size());
        const std::vector<unsigned char> empty(source.size());
        device.upload(to, empty.data(), empty.size());
        pieces.push_back({to, from, size});
        sources.push_back(std::move(source));
    }
    device.produce(how, pieces);
    device.synchronize();
    bool right = true;
    for (std::size_t piece = 0; piece < pieces.size(); ++piece) {
        std::vector<unsigned char> found(sources[piece].size());
        device.download(found.data(), pieces[piece].to, found.size());
        right &= std::memcmp(found.data(), sources[piece].data(), pieces[piece].bytes) == 0;
        for (std::size_t at = pieces[piece].bytes; at < found.size(); ++at) right &= found[at] == 0;
        device.release(pieces[piece].to);
        device.release(const_cast<void*>(pieces[piece].from));
    }
    return right;
}

void check_all() {
    const std::unique_ptr<Device> device = gpu::make_gpu_device(single_rank(), {});
    report("device has producers", device->has_producers());
    for (const Producer how : {Producer::late, Producer::early, Producer::cooperating}) {
        bool right = true;
        for (const std::size_t size :
             {std::size_t{0}, std::size_t{2}, std::size_t{16}, std::size_t{7170}, std::size_t{30'000'006}})
            right &= produces(*device, how, size, 3 * size + 2);
        const char* names[] = {"producer late", "producer early", "producer cooperating"};
        report(names[static_cast<int>(how)], right);
    }

    const FreshInput nothing{};
    const auto recording = device->record([&] { device->produce(Producer::cooperating, std::span(&nothing, 0)); });
    const double us = device->time_us(*recording);
    report("a recorded cooperating producer takes 6 us or more, not a second", us >= 6 && us < 1e6);

    bool refused = false;
    try {
        const std::vector<FreshInput> many(9);
        device->produce(Producer::late, many);
    } catch (const Error&) {
        refused = true;
    }
    report("more pieces than a producer takes are refused", refused);
}

}  // namespace
}  // namespace latent_moe

int main() {
    if (const std::string reason = latent_moe::gpu::why_unavailable(); !reason.empty()) {
        std::printf("no GPU here: %s\n", reason.c_str());
        return 3;
    }
    try {
        latent_moe::check_all();
    } catch (const latent_moe::Error& error) {
        std::printf("FAIL: %s\n", error.what());
        return 1;
    }
    return latent_moe::failures == 0 ? 0 : 1;
}
