// column_parallel: every rank makes its own columns of the output, from its own rows of W_up.
//
//     all-reduce latent + norm, and of the shared partials to each rank the columns that it owns   (one exchange)
//       → own columns = their shared sum + product
//       → all-gather by columns, prefix added
//
// On the wire that is what one all-reduce of everything at the end would take; but half of it travels with the latents, and
// what comes last has nothing left to add.
#include "tails/schedule.h"

namespace latent_moe {

void column_parallel_tail(Backend& backend, const TailCall& whole_call) {
    const OwnColumns columns(whole_call.shape.hidden, whole_call.world);
    const TokenRange& mine = columns.of(whole_call.rank);
    for_each_block(backend, whole_call, [&](const TailCall& call) {
        Lane& lane = backend.main();
        const Matrix latent = backend.scratch(Scratch::latent, call.tokens);
        const Matrix own = call.before_prefix(backend).column_range(mine.first, mine.count);
        const ConstMatrix partial = call.reduces_shared() ? call.shared : ConstMatrix{};
        lane.reduce_for_columns(Step::reduce_latent, call.routed, backend.gamma(call.layer), latent, partial, columns.all(),
                                own);
        const ConstMatrix shared = partial.present() ? own : call.shared.column_range(mine.first, mine.count);
        lane.project(latent, call.layer, WeightPart::shard, {shared, {}}, own);
        lane.gather_columns(Step::gather_output, own, columns.all(), call.out, call.prefix);
    });
}

}  // namespace latent_moe
