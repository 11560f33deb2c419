// token_parallel: each rank finishes its own tokens. The least bytes on the wire; a sequence-parallel caller stops before
// the gather.
//
//     reduce-scatter latent by tokens + norm → reduce-scatter shared by tokens → whole W_up on own tokens → all-gather
//
// Blocks are cut from every rank's own tokens, so that ownership is that of the whole call.
#include <algorithm>
#include <array>

#include "tails/schedule.h"

namespace latent_moe {

void token_parallel_tail(Backend& backend, const TailCall& call) {
    std::array<TokenRange, max_world> owned;
    std::int64_t most = 0;
    for (int rank = 0; rank < call.world; ++rank) {
        owned[static_cast<std::size_t>(rank)] = even_part(call.tokens, call.world, rank);
        most = std::max(most, owned[static_cast<std::size_t>(rank)].count);
    }

    Lane& lane = backend.main();
    const void* gamma = backend.gamma(call.layer);
    std::int64_t done = 0;
    std::int64_t index = 0;
    do {
        const std::int64_t block = std::min(backend.block_tokens(), most - done);
        std::array<TokenRange, max_world> ranges;
        for (std::size_t rank = 0; rank < static_cast<std::size_t>(call.world); ++rank) {
            const std::int64_t left = std::max<std::int64_t>(owned[rank].count - done, 0);
            ranges[rank] = {owned[rank].first + std::min(done, owned[rank].count), std::min(block, left)};
        }
        const std::span<const TokenRange> own(ranges.data(), static_cast<std::size_t>(call.world));
        const TokenRange mine = own[static_cast<std::size_t>(call.rank)];
        // A sequence-parallel caller's prefix and output hold this rank's own tokens only.
        const std::int64_t out_row = call.stop_before_gather ? done : mine.first;
        const Matrix out = call.out.row_range(std::min(out_row, call.out.rows), mine.count);
        const ConstMatrix prefix = call.prefix.row_range(std::min(out_row, call.out.rows), mine.count);

        backend.begin_block(index++);
        const Matrix latent = backend.scratch(Scratch::latent, mine.count);
        lane.reduce_scatter_norm(Step::reduce_latent, call.routed, own, gamma, latent);
        ConstMatrix shared = call.shared.row_range(mine.first, mine.count);
        if (call.reduces_shared()) {
            const Matrix sum = backend.scratch(Scratch::shared, mine.count);
            lane.reduce_scatter(Step::reduce_shared, call.shared, own, sum);
            shared = sum;
        }
        lane.project(latent, call.layer, WeightPart::whole, {shared, prefix}, out);
        if (!call.stop_before_gather) lane.all_gather(Step::gather_output, out, own, call.out);
        done += block;
    } while (done < most);
}

}  // namespace latent_moe
