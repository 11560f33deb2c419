// What kernels tell the host when something went wrong, and the host's way to make them stop.
#pragma once

#include "gpu/primitives/window.h"
#include "gpu/runtime/resources.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {

class FaultRecords {
public:
    FaultRecords(int rank, int timeout_ms);

    static constexpr int lanes = 5;  ///< main, side, the fused tail's own, the self-check's, the token-parallel kernel's
    static constexpr int loading = lanes;  ///< the record of kernels that are only being loaded: nobody reads it
    FaultRecord* record(int index) const noexcept { return &memory()->records[index]; }

    /// The first lane's fault, if any. Never blocks.
    Status poll() const;

    /// Kernels that wait on the window at `base` leave, and tell their peers. Any thread; the device is current.
    void abort(void* base) noexcept;

private:
    struct Memory {
        FaultRecord records[lanes + 1];
        std::uint32_t abort_word;
    };
    Memory* memory() const noexcept { return reinterpret_cast<Memory*>(memory_.get()); }

    int rank_;
    int timeout_ms_;
    MappedMemory memory_;
    Stream abort_stream_;  // a word that goes to the device must not queue behind the kernels that it is to end
};

}  // namespace latent_moe::gpu
