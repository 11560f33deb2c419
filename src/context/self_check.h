// The context's check of itself, where `Options::self_check_period` asks for it. Of each layer's calls, one in so many:
//
//     before   the rows that will be checked are copied, since a call may overwrite its inputs
//     after    weights: is the checksum of the packed W_up, its scales and γ what it was when the context was sealed?
//              output:  all ranks exchange those rows of their partials; each computes the unfused chain for its own columns
//                       with the plain loops of core/reference.cpp, which no tail uses, and compares
//              all ranks exchange what they found: a mismatch on one is an error on all
//
// Where calls only enqueue work, the device does the same by itself (`DeviceCheck`), and this only hands calls on.
//
// A call of up to 16 tokens is checked whole, a larger one in 16 rows, others each time. What a rank finds wrong it saves to
// a safetensors file, with the inputs of all ranks, which `latent-moe run --inputs` takes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tails/backend.h"
#include "tails/schedule.h"

namespace latent_moe {

class SelfCheck {
public:
    /// Nothing is checked where `period` is 0. Throws `unsupported` if the backend cannot.
    SelfCheck(Backend& backend, const Shape& shape, std::int64_t period, std::string folder);

    bool on() const noexcept { return period_ > 0; }
    /// Of a layer that is complete; layers in order.
    void seal_layer(const PackedLayer& layer);
    /// Throws `mismatch` if a layer's weights have changed.
    void verify_weights(std::size_t index, std::int64_t id, const PackedLayer& layer) const;

    /// Whether the next call of layer `index` is to be checked; counts it. The same on every rank.
    bool due(std::size_t index) noexcept;
    /// Before a call that is due.
    void keep(const TailCall& call, const CallIdentity& identity, std::size_t index);
    /// After it; collective. Throws `mismatch`, on every rank, saying what differs and where it was saved. Whether the host
    /// has checked: a device counts its own checks.
    bool verify(const TailCall& call, const CallIdentity& identity, std::size_t index);

    /// After a fault that a device reported: saves what all ranks put in if this rank's check found it, and says where.
    /// Waits for copies from the device.
    std::string save_device_mismatch(const std::string& what, int rank, int context) const;

private:
    /// Rows of one matrix that were copied, one after another.
    struct Kept {
        std::vector<std::byte> bytes;
        std::int64_t columns = 0;
    };
    struct Gathered {
        std::vector<Kept> routed;  // a rank each
        std::vector<Kept> shared;
    };

    std::vector<std::int64_t> rows_to_check(const TailCall& call) const;
    Kept copy_rows(const ConstMatrix& matrix, std::int64_t first_token) const;
    std::vector<Kept> gather(const Kept& mine, int world);
    std::string compare(const TailCall& call, const CallIdentity& identity, const HostLayer& layer,
                        const Gathered& gathered);
    std::string save(const TailCall& call, const CallIdentity& identity, const Gathered& gathered,
                     const std::string& what) const;

    Backend& backend_;
    const Shape& shape_;
    std::int64_t period_;
    std::string folder_;
    std::vector<std::uint64_t> checksums_;  // a layer each
    std::vector<std::int64_t> calls_;       // a layer each
    std::uint64_t checks_ = 0;

    // Of the call that is checked.
    std::vector<std::int64_t> rows_;
    Kept routed_;
    Kept shared_;
    Kept prefix_;  // only the rows that this rank has
};

}  // namespace latent_moe
