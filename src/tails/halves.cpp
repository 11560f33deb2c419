// A call in two halves: the shared partials travel as soon as the shared experts have made them.
//
//     begin:   replicated       all-reduce shared                   → out
//              column_parallel  reduce-scatter shared by columns    → the rank's own columns of out
//              token_parallel   reduce-scatter shared by tokens     → the rank's own rows of out
//     finish:  the tail itself, whose shared rows lie reduced in out
#include "tails/schedule.h"

namespace latent_moe {

void reduce_shared_ahead(Backend& backend, Tail tail, const TailCall& whole_call) {
    Lane& lane = backend.main();
    if (tail == Tail::token_parallel) {
        return for_each_block_of_own_tokens(backend, whole_call, [&](std::span<const TokenRange> own, std::int64_t done) {
            const TokenRange mine = own[static_cast<std::size_t>(whole_call.rank)];
            const std::int64_t row = std::min(whole_call.stop_before_gather ? done : mine.first, whole_call.out.rows);
            lane.reduce_scatter(Step::reduce_shared, whole_call.shared, own, whole_call.out.row_range(row, mine.count));
        });
    }
    const OwnColumns columns(whole_call.shape.hidden, whole_call.world);
    for_each_block(backend, whole_call, [&](const TailCall& call) {
        if (tail == Tail::replicated) return lane.all_reduce(Step::reduce_shared, call.shared, call.out, {});
        const TokenRange& mine = columns.of(call.rank);
        lane.reduce_columns(Step::reduce_shared, call.shared, columns.all(), call.out.column_range(mine.first, mine.count));
    });
}

}  // namespace latent_moe
