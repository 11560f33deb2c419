// The fused tail's exchange on host threads: each rank two CTAs of a wave for every role. Bits are compared with a plain
// sum.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gpu/protocol/emulated_gpu.h"
#include "gpu/protocol/small_fused_tail.h"

#pragma GCC diagnostic ignored "-Wsign-conversion"  // as device code is written

namespace latent_moe::gpu {
namespace {

using small_fused::Shape;
using U = fused::U;

constexpr unsigned ctas = 2, waves = 3, wave = wave_size;
constexpr int capacity = 10, latent_units = 3, column_units = 2;
constexpr std::uint64_t soon = 400 * emulated::tick_ns, an_hour = 3'600'000'000'000;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr unsigned calls_of_all_ranks = 1536 / wave, most_ranks = 3;  // a call costs ten times as much
#else
constexpr unsigned calls_of_all_ranks = 12800 / wave, most_ranks = 4;
#endif

/// What the roles of a CTA share.
class Roles {
public:
    class NamedBarrier {
    public:
        void arrive() { all_.arrive(2 * wave); }
        void sync() { all_.sync(2 * wave); }

    private:
        emulated::Barrier all_;
    };
    float latents[capacity * latent_units][U::size], columns[capacity * column_units][U::size];
    NamedBarrier squares_ready, shared_ready;
};

/// A rank's tensors, and how many units of `out` were not the plain sum.
struct Tensors {
    std::vector<uint4> routed = std::vector<uint4>(capacity * latent_units);
    std::vector<uint4> shared, out;
    Roles roles[ctas];
    std::atomic<int> wrong{0};
    explicit Tensors(int world) : shared(static_cast<std::size_t>(capacity * column_units * world)), out(shared) {}
};

/// What a rank adds: any finite bits, the sentinel among them.
uint4 summand(int rank, std::uint32_t call, std::uint32_t unit) {
    const auto word = [&](std::uint32_t i) {
        std::uint32_t bits =
            (call * 7919 + static_cast<std::uint32_t>(rank) * 104729 + (4 * unit + i) * 15485863) * 0x9e3779b1u;
        bits ^= bits >> 15;
        return bits % 11 == 0 ? U::sentinel().x : bits & 0xbfffbfff;
    };
    return {word(0), word(1), word(2), word(3)};
}

class FusedTailOnHostThreads : public testing::TestWithParam<int> {
protected:
    const int world = GetParam();
    const Shape shape{world, latent_units, column_units, capacity};
    emulated::Windows windows{world, 128, control_bytes + shape.region_bytes(), U::sentinel().x};
    std::vector<std::unique_ptr<Tensors>> tensors;

    void SetUp() override {
        for (int r = 0; r < world; ++r) {
            tensors.push_back(std::make_unique<Tensors>(world));
            std::memset(static_cast<char*>(windows.base(r)) + control_bytes, 0, fused::state_bytes);
        }
    }

    /// `receivers`: CTAs more, which take the peers' columns.
    void launch_tail(emulated::Stream& stream, int rank, int rows, std::uint64_t timeout_ns, unsigned receivers = 0) {
        Tensors& t = *tensors[static_cast<std::size_t>(rank)];
        const auto rows_of = [](std::vector<uint4>& units, int row_units) {
            return UnitRows{reinterpret_cast<char*>(units.data()), std::int64_t{16} * row_units};
        };
        fused::Params p =
            small_fused::params(shape, windows.exchange(rank, timeout_ns), rows, rows_of(t.routed, latent_units),
                                rows_of(t.shared, column_units * world), rows_of(t.out, column_units * world));
        p.receivers = rows == 0 ? 0 : static_cast<int>(receivers);
        stream.launch({ctas + static_cast<unsigned>(p.receivers), waves * wave}, [&] {
            if (world == 2) {
                run_role(small_fused::Cta<2>(p, 0), t);
            } else {
                run_role(small_fused::Cta<3>(p, 0), t);
            }
        });
    }

private:
    template <class Cta>
    static void run_role(const Cta& cta, Tensors& t) {
        const int thread = static_cast<int>(threadIdx.x), lane = static_cast<int>(threadIdx.x % wave);
        if (cta.p.tokens == 0) return static_cast<void>(fused::take_part(cta, thread, waves * wave));
        if (blockIdx.x >= ctas) return fused::receive_columns(cta, thread, waves * wave);
        Roles& mine = t.roles[blockIdx.x];
        switch (threadIdx.x / wave) {
            case 0: return small_fused::protocol(cta, mine, lane);
            case 1: return small_fused::math(cta, mine, lane, wave);
            default: return small_fused::gather(cta, mine, lane, wave);
        }
    }
};

TEST_P(FusedTailOnHostThreads, GivesThePlainSumWhileTheRowsShrinkAndGrow) {
    std::mt19937 random(23);
    const unsigned calls = calls_of_all_ranks / static_cast<unsigned>(world);
    std::vector<int> rows(calls);
    for (int& r : rows) r = random() % 4 == 0 ? capacity : static_cast<int>(random() % (capacity + 1));
    emulated::run(world, {ctas + 1, waves * wave}, [&](int rank, emulated::Stream& stream) {
        Tensors& t = *tensors[static_cast<std::size_t>(rank)];
        const int out_units = column_units * world, first_shared = capacity * latent_units;
        const auto for_own = [](int count, auto body) {
            for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) body(i);
        };
        for (std::uint32_t call = 0; call < calls; ++call) {
            stream.launch_in_order({ctas, waves * wave}, [&] {  // a producer, which also looks at what the call before left
                for_own(call == 0 ? 0 : rows[call - 1] * out_units, [&](int i) {
                    float latent[U::size] = {}, shared[U::size] = {};
                    const int row = i / out_units, unit = i % column_units;
                    for (int r = 0; r < world; ++r) {
                        small_fused::add(latent, summand(r, call - 1, row * latent_units + unit % latent_units));
                        small_fused::add(shared, summand(r, call - 1, first_shared + i));
                    }
                    for (int e = 0; e < U::size; ++e) latent[e] += shared[e];
                    const uint4 want = U::canonical(U::pack(latent)), got = t.out[static_cast<std::size_t>(i)];
                    if (std::memcmp(&want, &got, 16) != 0) ++t.wrong;
                });
                for_own(rows[call] * latent_units, [&](int i) { t.routed[i] = summand(rank, call, i); });
                for_own(rows[call] * out_units, [&](int i) { t.shared[i] = summand(rank, call, first_shared + i); });
            });
            launch_tail(stream, rank, rows[call], an_hour, call % 3 == 0 ? 0 : 1);  // grids change too
        }
    });
    for (int r = 0; r < world; ++r) {
        EXPECT_EQ(tensors[static_cast<std::size_t>(r)]->wrong, 0) << "rank " << r;
        EXPECT_EQ(windows.record(r).code, 0U) << "rank " << r << ": expected no fault";
    }
}

TEST_P(FusedTailOnHostThreads, ARankThatNeverCallsEndsAllOthersAndIsNamed) {
    emulated::run(world, {ctas, waves * wave}, [&](int rank, emulated::Stream& stream) {
        if (rank == world - 1) return;
        launch_tail(stream, rank, 7, soon);
        launch_tail(stream, rank, 3, an_hour);  // finds the fault, and does not wait
        launch_tail(stream, rank, 0, an_hour);
    });
    for (int r = 0; r < world - 1; ++r) {
        EXPECT_EQ(windows.record(r).code, static_cast<std::uint32_t>(FaultCode::timeout)) << "rank " << r;
        EXPECT_EQ(windows.record(r).rank, world - 1) << "rank " << r;
        EXPECT_EQ(windows.record(r).call, 0U) << "rank " << r;
    }
    EXPECT_NE(static_cast<Control*>(windows.base(world - 1))->fault, 0U);
}

INSTANTIATE_TEST_SUITE_P(, FusedTailOnHostThreads, testing::Range(2, int{most_ranks} + 1),
                         [](const auto& param) { return "tp" + std::to_string(param.param); });

}  // namespace
}  // namespace latent_moe::gpu
