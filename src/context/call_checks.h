// What a call must satisfy before anything is touched.
#pragma once

#include <cstdint>

#include "core/deferred.h"
#include "core/matrix.h"
#include "latent_moe/context.h"
#include "latent_moe/options.h"
#include "latent_moe/shape.h"

namespace latent_moe {

/// Refuses rows that do not all begin at multiples of `bytes`, which a backend's kernels may need.
void require_alignment(const char* what, const ConstMatrix& matrix, std::int64_t bytes);

/// The caller's rows as a matrix. Throws `invalid_argument` if they are missing, or their stride is below `columns` or
/// negative.
ConstMatrix const_matrix(const char* what, const ConstRows& rows, std::int64_t count, std::int64_t columns, Dtype dtype);
Matrix matrix(const char* what, const Rows& rows, std::int64_t count, std::int64_t columns, Dtype dtype);

/// Refuses an output that overlaps an input, unless it is exactly that input (same first element and stride) and
/// `may_be_same`.
void require_no_overlap(const char* input_name, const ConstMatrix& input, const Matrix& out, bool may_be_same);

/// The caller's un-combined rows. `require_map` looks at every entry of the map, which must be host memory.
DeferredMatrix deferred_matrix(const DeferredRows& deferred, std::int64_t tokens, const Shape& shape);
void require_map(const DeferredMatrix& deferred, std::int64_t tokens);

void validate(const Options& options, const Shape& shape, int world);
void validate(const WeightView& view, const Shape& shape, int world, const void* gamma);

}  // namespace latent_moe
