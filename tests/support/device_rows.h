// Rows of a problem in the memory of a rank's device.
#pragma once

#include <vector>

#include "support/problem.h"
#include "tails/device.h"

namespace latent_moe::test {

class DeviceRows {
public:
    DeviceRows(Device& device, const Tensor& host) : device_(device), bytes_(host.content()) {
        memory_ = device.allocate(bytes_.size());
        device.upload(memory_, bytes_.data(), bytes_.size());
    }
    ~DeviceRows() { device_.release(memory_); }
    DeviceRows(const DeviceRows&) = delete;
    DeviceRows& operator=(const DeviceRows&) = delete;

    void* data() const noexcept { return memory_; }
    const std::vector<std::byte>& download() {
        device_.download(bytes_.data(), memory_, bytes_.size());
        return bytes_;
    }

private:
    Device& device_;
    std::vector<std::byte> bytes_;
    void* memory_;
};

}  // namespace latent_moe::test
