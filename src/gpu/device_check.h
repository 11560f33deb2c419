// The host's side of the self-check on the device (kernels/self_check.h): its memory, its launches, and what it says.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "gpu/kernels/self_check.h"
#include "gpu/primitives/window.h"
#include "gpu/runtime/resources.h"
#include "latent_moe/options.h"
#include "latent_moe/shape.h"
#include "tails/backend.h"

namespace latent_moe::gpu {

class GpuDeviceCheck final : public DeviceCheck {
public:
    /// With the rank's device current.
    GpuDeviceCheck(const Shape& shape, const Options& options, int rank, int world);

    /// Of its part of the window: a head like every window's, and the rows that are kept.
    std::int64_t window_bytes() const noexcept;
    /// Of this rank's part; before the first call and after a fault.
    void reset(void* base, cudaStream_t stream) const;
    /// Takes its memory and loads its kernels; `exchange.window` has this part's bases, `others` the heads of the windows
    /// that a mismatch stops too.
    void acquire(const Exchange& exchange, const std::vector<std::array<void*, max_ranks>>& others, FaultRecord* unread);
    void release() noexcept;
    std::size_t workspace_bytes() const noexcept { return scratch_.bytes(); }

    /// Enqueued on `stream` from now on.
    void set_stream(cudaStream_t stream) noexcept { stream_ = stream; }
    /// What was found on this rank, if anything. Never blocks.
    std::string finding() const;

    void seal_layer(const PackedLayer& layer) override;
    Checksums checksums(std::size_t index, const PackedLayer& layer) override;
    void before(const TailCall& call, const CallIdentity& identity, std::size_t index) override;
    void after(const TailCall& call, const CallIdentity& identity, std::size_t index) override;
    std::uint64_t checks() const noexcept override { return report().checks; }
    std::optional<KeptRows> wrong_call() override;

private:
    const CheckReport& report() const noexcept { return *reinterpret_cast<const CheckReport*>(report_.get()); }
    LayerCheck* layer_check(std::size_t index) const noexcept;
    WeightChecksum checksum_now(const PackedLayer& layer) const;
    CheckCall check_of(const TailCall& call, const CallIdentity& identity, std::size_t index) const;

    Shape shape_;
    std::int64_t period_;
    int rank_;
    int world_;
    int device_ = 0;
    MappedMemory report_;
    gpu::Stream own_stream_;
    cudaStream_t stream_ = nullptr;
    std::vector<DeviceMemory> layers_;
    std::vector<WeightChecksum> expected_;
    DeviceMemory alone_;    // the window of one rank
    DeviceMemory scratch_;  // the state, then the chain's
    CheckCall prepared_;    // but for what a call adds
    bool has_shared_;
};

}  // namespace latent_moe::gpu
