// The protocol under Relacy: small grids of two and three ranks make a few calls whose rows shrink and grow, and every
// execution that Relacy thinks of must give the plain sum, store nothing in no order, and end.
//
//     protocol_model [factor [model]]    factor: times the usual number of executions; one line a model; exit 1 if one
//     failed
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <string>

// Brings the target, Relacy, with it.
#include "gpu/kernels/all_reduce.cuh"
#include "gpu/protocol/small_fused_tail.h"

#pragma GCC diagnostic ignored "-Wsign-conversion"  // as device code is written

namespace latent_moe::gpu {
namespace {

constexpr int world = static_cast<int>(wave_size);  // a wave of one lane a rank is the narrowest that exchanges all headers
constexpr int most_rows = 2;
constexpr int slot_bytes = 256;
constexpr small_fused::Shape fused_shape{world, 1, 1, most_rows};
constexpr std::int64_t area = std::max<std::int64_t>(slots * slot_bytes, fused_shape.region_bytes());
constexpr std::size_t bytes_of_rank = (control_bytes + area + 127) / 128 * 128;
constexpr std::size_t control_words = sizeof(Control) / 4, slot_words = area / 4;
alignas(128) std::byte memory[model::most_ranks * bytes_of_rank];

using U = Unit<Dtype::bf16>;

/// Threads wait here for all others; what they did before is visible to them then, and nothing later.
template <int threads>
class Barrier {
public:
    void reset(unsigned members) { members_ = members; }

    unsigned arrive() {
        const unsigned phase = phase_;
        order_[phase % 2].release(rl::ctx().threadx_);
        if (++arrived_ == members_) {
            arrived_ = 0, ++phase_;
            order_[phase_ % 2].iteration_begin();
            waiting_.unpark_all(rl::ctx(), $);
        }
        return phase;
    }
    void wait(unsigned phase) {
        while (phase_ == phase) waiting_.park_current(rl::ctx(), false, false, false, $);
        order_[phase % 2].acquire(rl::ctx().threadx_);
    }
    void sync() { wait(arrive()); }

private:
    rl::waitset<threads> waiting_;
    rl::sync_var<threads> order_[2];
    unsigned members_ = 0, arrived_ = 0, phase_ = 0;
};

/// Ranks, each a grid of `ctas` CTAs of `waves` waves, one fiber a thread. `Derived` has `calls`, `kernel(call)`,
/// `begin()` and `first_word(offset)`: what a word behind the control words holds at first; nothing: nobody touches it.
template <class Derived, int ctas, int waves>
struct Grids : rl::test_suite<Derived, world * ctas * waves * world>, model::Neighbours {
    static constexpr int of_cta = waves * world, of_rank = ctas * of_cta, all = world * of_rank;
    static_assert(all <= model::most_threads && world <= model::most_ranks && ctas <= max_grid && world <= max_ranks);
    static constexpr std::size_t words_of_rank = control_words + slot_words;
    static_assert(world * words_of_rank <= model::most_words);

    rl::atomic<std::uint64_t> words[world * words_of_rank];
    Barrier<all> kernel_ends[world], cta_barriers[world * ctas], wave_barriers[world * ctas * waves];
    std::uint32_t values[all];
    int ended[all];  ///< the phase of kernel_ends that a thread has arrived at and not waited for; -1: none
    FaultRecord record;

    void before() {
        model::Machine& m = model::machine;
        std::memset(static_cast<void*>(&m), 0, sizeof m);
        m.neighbours = this, m.record = &record, m.memory = memory, m.words = words;
        m.bytes_of_rank = bytes_of_rank, m.control_bytes = control_bytes;
        m.control_words = control_words, m.slot_words = slot_words;
        m.header_count = 1;
        for (int t = 0; t < all; ++t) {
            const auto i = static_cast<unsigned>(t % of_rank);
            m.threads[t] = {t / of_rank, i / of_cta, ctas, i % of_cta, of_cta};
            ended[t] = -1;
        }
        for (std::size_t w = 0; w < std::size(words); ++w) {
            const std::size_t in_rank = w % words_of_rank;
            const std::optional<std::uint32_t> first =
                in_rank < control_words ? 0 : Derived::first_word((in_rank - control_words) * 4);
            if (first) words[w].store(*first, rl::mo_relaxed, $);
        }
        for (auto& b : kernel_ends) b.reset(of_rank);
        for (auto& b : cta_barriers) b.reset(of_cta);
        for (auto& b : wave_barriers) b.reset(world);
        static_cast<Derived*>(this)->begin();
    }

    void thread(unsigned index) {
        for (int call = 0; call < Derived::calls; ++call) {
            static_cast<Derived*>(this)->kernel(call);
            dependency_wait();
            ended[index] = static_cast<int>(kernel_ends[model::self().rank].arrive());
        }
    }

    Exchange exchange() {
        Exchange x{};
        x.window.rank = model::self().rank, x.window.world = world;
        for (int r = 0; r < world; ++r) x.window.base[r] = memory + r * bytes_of_rank;
        x.slot_bytes = slot_bytes, x.record = &record, x.timeout_ns = 1000;
        return x;
    }

    void sync_cta() override { cta_barriers[rl::thread_index() / of_cta].sync(); }
    void sync_wave() override { wave_barriers[rl::thread_index() / world].sync(); }
    std::uint32_t sum_over_wave(std::uint32_t value) override {
        const unsigned me = rl::thread_index(), first = me / world * world;
        values[me] = value;
        sync_wave();
        std::uint32_t sum = 0;
        for (unsigned i = 0; i < wave_size; ++i) sum += values[first + i];
        sync_wave();
        return sum;
    }
    void dependency_wait() override {
        int& phase = ended[rl::thread_index()];
        if (phase < 0) return;
        kernel_ends[model::self().rank].wait(static_cast<unsigned>(phase));
        phase = -1;
    }
};

/// A unit that a rank adds in a call: small numbers, so that sums are exact in any order, and the sentinel now and then.
uint4 summand(int rank, int call, int place) {
    const auto number = [&](int n) { return U::canonical(uint4{pack_bf16x2(float(n), float(-n)), 0, 0, 0}).x; };
    const int n = 1 + rank + 4 * call + 40 * place;
    const std::uint32_t sentinel = U::sentinel().x;
    return {number(n), (rank + call) % 3 == 0 ? sentinel : number(n + 1), number(2), (rank + call) % 2 == 0 ? sentinel : 0};
}
void add_summands(float (&sum)[U::size], int call, int place) {
    for (int r = 0; r < world; ++r) small_fused::add(sum, summand(r, call, place));
}
void compare(const char* what, int rank, int call, int row, uint4 got, const float (&sum)[U::size]) {
    const uint4 want = U::canonical(U::pack(sum));
    if (got.x != want.x || got.y != want.y || got.z != want.z || got.w != want.w) {
        model::fail("wrong: rank %d, call %d, row %d, %s: %08x %08x %08x %08x instead of %08x %08x %08x %08x", rank, call,
                    row, what, got.x, got.y, got.z, got.w, want.x, want.y, want.z, want.w);
    }
}

/// Rows of the calls: three rounds through the slots, and each slot sees its rows shrink and grow.
constexpr int rows_of_call[] = {2, 1, 2, 1, 2, 0, 2, 2, 1};

/// The row all-reduce: CTA 0 keeps the protocol, CTA 1 carries rows of one unit.
template <int stages>
struct AllReduceModel : Grids<AllReduceModel<stages>, 2, 1> {
    static constexpr int calls = std::size(rows_of_call);
    uint4 x[world][calls][most_rows], y[world][calls][most_rows];

    static std::optional<std::uint32_t> first_word(std::size_t) { return U::sentinel().x; }
    void begin() {
        for (int r = 0; r < world; ++r) {
            for (int c = 0; c < calls; ++c) {
                for (int m = 0; m < most_rows; ++m) x[r][c][m] = summand(r, c, m), y[r][c][m] = {};
            }
        }
    }
    void kernel(int call) {
        const int rank = model::self().rank;
        reduction::Params p{};
        p.exchange = this->exchange();
        p.x = {reinterpret_cast<char*>(x[rank][call]), 16}, p.y = {reinterpret_cast<char*>(y[rank][call]), 16};
        p.tokens = p.units = static_cast<std::uint32_t>(rows_of_call[call]), p.row_units = 1;
        if constexpr (stages == 1) {
            reduction::one_stage<Dtype::bf16, batch_for(world), world>(p);
        } else {
            reduction::two_stage<Dtype::bf16, batch_for(world), world>(p);
        }
    }
    void after() {
        for (int r = 0; r < world; ++r) {
            for (int c = 0; c < calls; ++c) {
                for (int m = 0; m < rows_of_call[c]; ++m) {
                    float sum[U::size] = {};
                    add_summands(sum, c, m);
                    compare("sum", r, c, m, y[r][c][m], sum);
                }
            }
        }
    }
};

/// The fused tail: two CTAs a rank, a wave for each role; rows of one unit of latents and one of columns from each rank.
struct FusedTailModel : Grids<FusedTailModel, 2, 3> {
    static constexpr int calls = std::size(rows_of_call), ctas = 2;
    struct NamedBarrier : Barrier<all> {};
    struct Shared {
        float latents[most_rows][U::size], columns[most_rows][U::size];
        NamedBarrier squares_ready, shared_ready;
    };
    Shared shared[world][ctas];
    uint4 routed[world][calls][most_rows], partials[world][calls][most_rows][world], out[world][calls][most_rows][world];

    static int place_of(int row, int column_owner) { return 2 + most_rows * column_owner + row; }
    static std::optional<std::uint32_t> first_word(std::size_t offset) {
        constexpr std::size_t counts = offsetof(fused::Head, pooled);
        if (offset >= counts && offset < counts + sizeof fused::Head::pooled) return std::nullopt;
        return offset < static_cast<std::size_t>(fused::state_bytes) ? 0 : U::sentinel().x;
    }
    void begin() {
        for (int r = 0; r < world; ++r) {
            for (Shared& cta : shared[r]) cta.squares_ready.reset(2 * world), cta.shared_ready.reset(2 * world);
            for (int c = 0; c < calls; ++c) {
                for (int m = 0; m < most_rows; ++m) {
                    routed[r][c][m] = summand(r, c, m);
                    for (int o = 0; o < world; ++o)
                        partials[r][c][m][o] = summand(r, c, place_of(m, o)), out[r][c][m][o] = {};
                }
            }
        }
    }
    void kernel(int call) {
        using Cta = small_fused::Cta<world>;
        const int rank = model::self().rank, thread = static_cast<int>(model::self().thread);
        const auto rows_at = [](auto& rows) { return UnitRows{reinterpret_cast<char*>(rows), sizeof rows[0]}; };
        const fused::Params p = small_fused::params(fused_shape, exchange(), rows_of_call[call], rows_at(routed[rank][call]),
                                                    rows_at(partials[rank][call]), rows_at(out[rank][call]));
        const Cta cta(p, 0);
        Shared& mine = shared[rank][model::self().cta];
        if (p.tokens == 0) return static_cast<void>(fused::take_part(cta, thread, of_cta));
        switch (thread / world) {
            case 0: return small_fused::protocol(cta, mine, thread);
            case 1: return small_fused::math(cta, mine, thread % world, world);
            default: return small_fused::gather(cta, mine, thread % world, world);
        }
    }
    void after() {
        for (int r = 0; r < world; ++r) {
            for (int c = 0; c < calls; ++c) {
                for (int m = 0; m < rows_of_call[c]; ++m) {
                    for (int o = 0; o < world; ++o) {
                        float sum[U::size] = {};
                        add_summands(sum, c, m), add_summands(sum, c, place_of(m, o));
                        compare("column", r, c, m, out[r][c][m][o], sum);
                    }
                }
            }
        }
    }
};

/// Swallows Relacy's own account of an execution, thousands of lines.
class Nothing : public std::streambuf {
    int overflow(int c) override { return c; }
};

template <class Model>
bool check(const char* name, std::uint64_t executions, const std::string& only) {
    if (!only.empty() && only != name) return true;
    Nothing nothing;
    std::ostream nowhere(&nothing);
    rl::test_params params;
    params.iteration_count = executions;
    params.execution_depth_limit = 200'000;
    params.output_stream = &nowhere, params.progress_stream = &nowhere;
    const bool ok = rl::simulate<Model>(params);
    if (ok) {
        std::printf("%s: %llu executions, nothing found\n", name, static_cast<unsigned long long>(params.stop_iteration));
    } else {
        const char* what = model::machine.fault[0] ? model::machine.fault : rl::test_result_str(params.test_result);
        std::printf("%s: execution %llu: %s\n", name, static_cast<unsigned long long>(params.stop_iteration), what);
    }
    std::fflush(stdout);
    return ok;
}

}  // namespace
}  // namespace latent_moe::gpu

int main(int argc, char** argv) {
    using namespace latent_moe::gpu;
    const double factor = argc > 1 ? std::atof(argv[1]) : 1;
    const std::string only = argc > 2 ? argv[2] : "";
    const auto times = [&](double executions) { return static_cast<std::uint64_t>(executions * factor) + 1; };
    bool ok = check<AllReduceModel<1>>("all_reduce_in_one_stage", times(4000 / world), only);
    ok &= check<AllReduceModel<2>>("all_reduce_in_two_stages", times(4000 / world), only);
    ok &= check<FusedTailModel>("fused_tail", times(4000 / world), only);
    return ok ? 0 : 1;
}
