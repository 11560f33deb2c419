// column_parallel: every rank multiplies by its own rows of W_up only, and one all-reduce both sums and gathers.
//
//     partial of rank r:  [ shared_r | shared_r + product | shared_r ]      only its own columns take the product,
//     all-reduce:         [ Σ shared + product, for all columns      ]      so every column takes it once
#include "tails/schedule.h"

namespace latent_moe {
namespace {

/// This rank's shared partial where it may be overwritten.
Matrix writable_partial(Backend& backend, const TailCall& call) {
    if (call.shared.present() && call.consume_shared) {
        // The caller has said so: `TailInput::consume_shared`.
        return {const_cast<std::byte*>(call.shared.data), call.tokens, call.shape.hidden, call.shared.stride,
                call.shared.dtype};
    }
    const Matrix partial = call.before_prefix(backend);
    if (!call.shared.present()) {
        backend.main().fill_zero(partial);
    } else if (call.shared.data != partial.data) {
        backend.main().copy(call.shared, partial);
    }
    return partial;
}

}  // namespace

void column_parallel_tail(Backend& backend, const TailCall& whole_call) {
    for_each_block(backend, whole_call, [&](const TailCall& call) {
        Lane& lane = backend.main();
        const Matrix latent = backend.scratch(Scratch::latent, call.tokens);
        lane.all_reduce_norm(Step::reduce_latent, call.routed, backend.gamma(call.layer), latent);
        const Matrix partial = writable_partial(backend, call);
        const TokenRange columns = even_part(call.shape.hidden, call.world, call.rank);
        const Matrix own_columns = partial.column_range(columns.first, columns.count);
        lane.project(latent, call.layer, WeightPart::shard, {own_columns, {}}, own_columns);
        lane.all_reduce(Step::reduce_output, partial, call.out, call.prefix);
    });
}

}  // namespace latent_moe
