// token_parallel: each rank finishes its own tokens. The least bytes on the wire; a sequence-parallel caller stops before
// the gather.
//
//     reduce-scatter latent by tokens + norm → reduce-scatter shared by tokens → whole W_up on own tokens → all-gather
#include "tails/schedule.h"

namespace latent_moe {

void token_parallel_tail(Backend& backend, const TailCall& call) {
    if (backend.whole_token_parallel_tail(call)) return;
    Lane& lane = backend.main();
    const void* gamma = backend.gamma(call.layer);
    for_each_block_of_own_tokens(backend, call, [&](std::span<const TokenRange> own, std::int64_t done) {
        const TokenRange mine = own[static_cast<std::size_t>(call.rank)];
        // A sequence-parallel caller's prefix and output hold this rank's own tokens only.
        const std::int64_t out_row = std::min(call.stop_before_gather ? done : mine.first, call.out.rows);
        const Matrix out = call.out.row_range(out_row, mine.count);
        const ConstMatrix prefix = call.prefix.row_range(out_row, mine.count);

        const Matrix latent = backend.scratch(Scratch::latent, mine.count);
        lane.reduce_scatter_norm(Step::reduce_latent, call.routed, own, gamma, latent);
        ConstMatrix shared = call.shared_in_out ? ConstMatrix(out) : call.shared.row_range(mine.first, mine.count);
        if (call.reduces_shared()) {
            const Matrix sum = backend.scratch(Scratch::shared, mine.count);
            lane.reduce_scatter(Step::reduce_shared, call.shared, own, sum);
            shared = sum;
        }
        lane.project(latent, call.layer, WeightPart::whole, {shared, prefix}, out);
        if (!call.stop_before_gather) lane.all_gather(Step::gather_output, out, own, call.out);
    });
}

}  // namespace latent_moe
