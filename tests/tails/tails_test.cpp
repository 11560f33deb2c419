// Every portable tail on ranks of either kind, against the float64 reference and beside the exact chain.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "core/float8_packing.h"
#include "support/harness.h"
#include "support/problem.h"

namespace latent_moe {
namespace {

using test::on_ranks;
using test::Problem;
using test::ProblemOptions;
using test::Tensor;

std::vector<Tail> allowed_tails(const Context& context, std::int64_t tokens) {
    std::vector<Tail> tails;
    for (const Candidate& candidate : context.plan(tokens).candidates) tails.push_back(candidate.tail);
    std::sort(tails.begin(), tails.end());  // the plan's order depends on the machine
    return tails;
}

std::string described(Tail tail, const Problem& problem) {
    return std::string(name(tail)) + ", " + std::to_string(problem.world) + " ranks, " + std::to_string(problem.tokens) +
           " tokens, " + name(problem.shape.activations);
}

/// Runs every allowed tail twice; checks accuracy, identical ranks, an identical repeat and that nothing else was written.
void check_every_tail(const Problem& problem, std::int64_t padding = 0, const std::vector<Tail>& expected_tails = {}) {
    const double chain_error = problem.chain_error();
    on_ranks(problem.world, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(problem, bootstrap, problem.context_options());
        const std::vector<Tail> tails = allowed_tails(context, problem.tokens);
        for (const Tail tail : expected_tails)
            EXPECT_NE(std::find(tails.begin(), tails.end(), tail), tails.end()) << name(tail);
        for (const Tail tail : tails) {
            Tensor first = problem.output(padding);
            Tensor again = problem.output(padding);
            for (Tensor* out : {&first, &again}) {
                out->poison();
                const Status status = context.layer(0).run(tail, problem.input(bootstrap.rank), out->writable_rows());
                ASSERT_TRUE(status.ok()) << described(tail, problem) << ": " << status.message();
            }
            const double error = relative_l2(first.matrix(), problem.reference());
            EXPECT_LE(error, test::allowed_ratio(tail) * chain_error) << described(tail, problem);
            EXPECT_TRUE(test::same_on_all_ranks(bootstrap, first.content())) << described(tail, problem);
            EXPECT_EQ(first.content(), again.content()) << described(tail, problem);
            EXPECT_TRUE(first.padding_intact()) << described(tail, problem);
        }
    });
}

TEST(Tails, MatchTheReferenceAtEveryRankAndTokenCount) {
    for (const int world : {1, 2, 3, 4, 7, 8}) {
        for (const std::int64_t tokens : {0, 1, 2, 5, 8, 33, 257, 300}) check_every_tail(Problem(world, tokens));
    }
}

TEST(Tails, RunWhereRanksDoNotDivideTheHiddenSize) {
    for (const int world : {5, 11, 16})
        check_every_tail(Problem(world, 9), 0, {Tail::replicated, Tail::overlap, Tail::token_parallel});
}

TEST(Tails, RunInEveryActivationType) {
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
        for (const Dtype weights : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
            if (dtype == Dtype::f32) {
                // The chain rounds nothing here: its error is that of float32 sums in another order.
                const Problem problem(2, 17, {.dtype = dtype, .weight_dtype = weights});
                on_ranks(2, [&](const Bootstrap& bootstrap) {
                    const Context context = make_context(problem, bootstrap, problem.context_options());
                    for (const Tail tail : allowed_tails(context, 17)) {
                        Tensor out = problem.output();
                        ASSERT_TRUE(context.layer(0).run(tail, problem.input(bootstrap.rank), out.writable_rows()).ok());
                        EXPECT_LT(relative_l2(out.matrix(), problem.reference()), 1e-6) << name(tail);
                    }
                });
            } else {
                check_every_tail(Problem(3, 17, {.dtype = dtype, .weight_dtype = weights}));
            }
        }
    }
}

TEST(Tails, RunWithoutANorm) {
    for (const int world : {2, 3}) {
        check_every_tail(Problem(world, 33, {.norm = Norm::none, .routed_scale = 0.5F}), 0, {Tail::late_reduce});
    }
}

TEST(Tails, ScaleTheRoutedProduct) {
    check_every_tail(Problem(2, 12, {.routed_scale = 2.5F}));
}

TEST(Tails, RunWithoutAPrefix) {
    check_every_tail(Problem(3, 12, {.prefix = false}));
}

TEST(Tails, HonourRowStridesAndTouchNothingBetweenRows) {
    check_every_tail(Problem(3, 40, {.padding = 24}), 40);
}

TEST(Tails, TakeASharedPartialThatIsAbsentOrAlreadyReduced) {
    check_every_tail(Problem(3, 12, {.shared = SharedState::absent}), 0,
                     {Tail::replicated, Tail::column_parallel, Tail::token_parallel});
    check_every_tail(Problem(3, 12, {.shared = SharedState::reduced}), 0,
                     {Tail::replicated, Tail::column_parallel, Tail::token_parallel});
}

TEST(Tails, TakeFloat8WeightsWithScalarAndRowScales) {
    Problem problem(2, 9, {.weight_dtype = Dtype::e4m3});
    std::vector<float> row_scales(static_cast<std::size_t>(problem.shape.hidden));
    for (std::size_t row = 0; row < row_scales.size(); ++row) row_scales[row] = 0.01F * static_cast<float>(1 + row % 5);
    ReferenceInput input = problem.reference_input();
    input.weight_scale = 0.75F;
    input.row_scales = row_scales.data();
    const std::vector<double> reference = reference_tail(input);
    const double chain_error = relative_l2(chain_tail(input), reference);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        for (const bool sharded : {false, true}) {
            Context context = Context::create(problem.shape, bootstrap, problem.context_options());
            WeightView view = sharded ? problem.weight_shard(bootstrap.rank) : problem.weight_view();
            view.scale = 0.75F;
            view.row_scales = row_scales.data() + (sharded ? bootstrap.rank * view.rows : 0);
            const Layer layer = context.add_layer(7, view, problem.gamma_data());
            context.seal();
            for (const Tail tail : allowed_tails(context, problem.tokens)) {
                Tensor out = problem.output();
                ASSERT_TRUE(layer.run(tail, problem.input(bootstrap.rank), out.writable_rows()).ok());
                EXPECT_LE(relative_l2(out.matrix(), reference), 1.05 * chain_error)
                    << name(tail) << (sharded ? " from shards" : "");
            }
        }
    });
}

/// Runs every tail from the problem's routed rows and again from un-combined ones, which must come to the same bits.
void check_deferred_rows(const Problem& problem, const test::Uncombined& rows, Options options) {
    options.deferred_finalize = true;
    on_ranks(problem.world, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(problem, bootstrap, options);
        for (const Tail tail : allowed_tails(context, problem.tokens)) {
            Tensor plain = problem.output();
            Tensor deferred = problem.output();
            TailInput input = problem.input(bootstrap.rank);
            const Tensor combined = rows.combined(bootstrap.rank);
            input.routed = combined.rows();
            ASSERT_TRUE(context.layer(0).run(tail, input, plain.writable_rows()).ok());
            input.routed = {};
            const DeferredRows handed_over = rows.deferred(bootstrap.rank);
            input.deferred = &handed_over;
            const Status status = context.layer(0).run(tail, input, deferred.writable_rows());
            ASSERT_TRUE(status.ok()) << described(tail, problem) << ": " << status.message();
            EXPECT_EQ(plain.content(), deferred.content()) << described(tail, problem);
        }
    });
}

TEST(Tails, CombineTheExpertsRowsThemselvesWithTheBitsOfASeparateStep) {
    for (const std::int64_t tokens : {0, 1, 33, 300}) {
        for (const Dtype weights : {Dtype::bf16, Dtype::f32}) {
            const Problem problem(3, tokens);
            check_deferred_rows(problem, test::Uncombined(problem, 6, weights), problem.context_options());
        }
    }
    const Problem without_norm(2, 17, {.norm = Norm::none, .dtype = Dtype::f16});
    check_deferred_rows(without_norm, test::Uncombined(without_norm, 3, Dtype::f32), without_norm.context_options());
}

TEST(Tails, PackFloat8WeightsFromWiderOnesAndFromShardsAlike) {
    const Problem problem(2, 40, {.hidden = 672, .latent = 256});
    const Float8Rows packed = pack_float8(problem.weight_view(), problem.shape.latent);
    ReferenceInput input = problem.reference_input();
    input.weights = {reinterpret_cast<const std::byte*>(packed.bits.data()), problem.shape.hidden, problem.shape.latent,
                     problem.shape.latent, Dtype::e4m3};
    input.row_scales = packed.scales.data();
    const std::vector<double> reference = reference_tail(input);
    const double chain_error = relative_l2(chain_tail(input), reference);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        Options options = problem.context_options();
        options.float8_weights = true;
        const Context whole = make_context(problem, bootstrap, options);
        Context sharded = Context::create(problem.shape, bootstrap, options);
        sharded.add_layer(7, problem.weight_shard(bootstrap.rank), problem.gamma_data());
        sharded.seal();
        EXPECT_EQ(whole.weight_bytes(),
                  static_cast<std::size_t>(problem.shape.hidden * (problem.shape.latent + 4) + problem.shape.latent * 2));
        for (const Tail tail : allowed_tails(whole, problem.tokens)) {
            Tensor out = problem.output();
            Tensor from_shards = problem.output();
            ASSERT_TRUE(whole.layer(0).run(tail, problem.input(bootstrap.rank), out.writable_rows()).ok());
            ASSERT_TRUE(sharded.layer(0).run(tail, problem.input(bootstrap.rank), from_shards.writable_rows()).ok());
            EXPECT_LE(relative_l2(out.matrix(), reference), 1.05 * chain_error) << name(tail);
            EXPECT_LT(relative_l2(out.matrix(), problem.reference()), 0.03) << name(tail) << " against the weights as given";
            EXPECT_EQ(out.content(), from_shards.content()) << name(tail);
        }
    });
}

TEST(Tails, InABatchInvariantContextGiveARowTheSameBitsWhateverTheBatch) {
    const Problem problem(3, 300, {.hidden = 1344, .latent = 512});
    on_ranks(3, [&](const Bootstrap& bootstrap) {
        for (const std::optional<Tail> asked : {std::optional<Tail>(), std::optional(Tail::token_parallel)}) {
            Options options = problem.context_options();
            options.batch_invariant = true;
            options.tail = asked;
            const Context context = make_context(problem, bootstrap, options);
            ASSERT_EQ(context.plan(1).candidates.size(), 1U);
            EXPECT_EQ(context.plan(1).tail, context.plan(options.max_tokens).tail);
            EXPECT_LE(test::error_of(context, problem, bootstrap), 1.05 * problem.chain_error());
            Tensor all = problem.output();
            ASSERT_TRUE(context.layer(0).run(problem.input(bootstrap.rank), all.writable_rows()).ok());
            for (const auto& [first, count] : {std::pair<std::int64_t, std::int64_t>{0, 1}, {7, 1}, {2, 5}, {40, 260}}) {
                Tensor some(count, problem.shape.hidden, problem.shape.activations);
                TailInput input = problem.input(bootstrap.rank);
                for (ConstRows* rows : {&input.routed, &input.shared, &input.prefix}) {
                    rows->data = static_cast<const std::byte*>(rows->data) + first * rows->stride * 2;
                }
                input.tokens = count;
                ASSERT_TRUE(context.layer(0).run(input, some.writable_rows()).ok());
                for (std::int64_t row = 0; row < count; ++row) {
                    ASSERT_EQ(std::memcmp(all.matrix().row(first + row), some.matrix().row(row),
                                          static_cast<std::size_t>(some.matrix().row_bytes())),
                              0)
                        << "row " << first + row << " of " << count << " tokens from " << first;
                }
            }
        }
    });
}

TEST(Tails, ReadAndWriteRowsThatAnEnginePaddedToAWiderHiddenSize) {
    // The engine's hidden size is 1408, the model's 1344: strides cut both inputs and output, and of W_up only the model's
    // rows are handed over.
    const Problem problem(2, 19, {.padding = 64});
    check_every_tail(problem, 64);
}

TEST(Tails, TakeThePartialsOfExpertParallelRanks) {
    // Each rank's summand holds its own experts' share; a rank without a token's experts adds zeros. Shared is reduced
    // already.
    for (const std::int64_t tokens : {1, 33}) {
        Problem problem(4, tokens, {.shared = SharedState::reduced});
        for (std::int64_t token = 0; token < tokens; ++token) {
            for (std::size_t rank = 0; rank < 4; ++rank) {
                if (rank == static_cast<std::size_t>(token % 4)) continue;
                for (std::int64_t column = 0; column < problem.shape.latent; ++column)
                    problem.routed[rank].set(token, column, 0);
            }
        }
        const double chain_error = problem.chain_error();
        on_ranks(4, [&](const Bootstrap& bootstrap) {
            Options options = problem.context_options();
            options.expert_parallel = true;
            const Context context = make_context(problem, bootstrap, options);
            const std::vector<Tail> tails = allowed_tails(context, tokens);
            EXPECT_EQ(tails.size(), 3U);  // replicated, column_parallel, token_parallel
            for (const Tail tail : tails) {
                Tensor out = problem.output();
                ASSERT_TRUE(context.layer(0).run(tail, problem.input(bootstrap.rank), out.writable_rows()).ok());
                EXPECT_LE(relative_l2(out.matrix(), problem.reference()), 1.05 * chain_error) << name(tail);
            }
        });
    }
}

TEST(Tails, GiveTheSameBitsFromWholeAndFromShardedWeights) {
    for (const int world : {2, 3}) {
        const Problem problem(world, 21);
        on_ranks(world, [&](const Bootstrap& bootstrap) {
            const Context whole = make_context(problem, bootstrap, problem.context_options());
            Context sharded = Context::create(problem.shape, bootstrap, problem.context_options());
            sharded.add_layer(7, problem.weight_shard(bootstrap.rank), problem.gamma_data());
            sharded.seal();
            for (const Tail tail : allowed_tails(whole, problem.tokens)) {
                Tensor from_whole = problem.output();
                Tensor from_shards = problem.output();
                ASSERT_TRUE(whole.layer(0).run(tail, problem.input(bootstrap.rank), from_whole.writable_rows()).ok());
                ASSERT_TRUE(sharded.layer(0).run(tail, problem.input(bootstrap.rank), from_shards.writable_rows()).ok());
                EXPECT_EQ(from_whole.content(), from_shards.content()) << name(tail);
            }
        });
    }
}

TEST(Tails, AddThePrefixBitIdenticallyToAddingItAfterwards) {
    const Problem with(2, 19);
    const Problem without(2, 19, {.prefix = false});
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(with, bootstrap, with.context_options());
        for (const Tail tail : allowed_tails(context, with.tokens)) {
            Tensor inside = with.output();
            Tensor afterwards = with.output();
            ASSERT_TRUE(context.layer(0).run(tail, with.input(bootstrap.rank), inside.writable_rows()).ok());
            ASSERT_TRUE(context.layer(0).run(tail, without.input(bootstrap.rank), afterwards.writable_rows()).ok());
            for (std::int64_t row = 0; row < with.tokens; ++row) {
                for (std::int64_t column = 0; column < with.shape.hidden; ++column) {
                    afterwards.set(row, column, afterwards.at(row, column) + with.prefix.at(row, column));
                }
            }
            EXPECT_EQ(inside.content(), afterwards.content()) << name(tail);
        }
    });
}

TEST(Tails, MayWriteTheirOutputOverSharedOrPrefix) {
    for (const std::int64_t tokens : {7, 300}) {
        const Problem problem(2, tokens);
        on_ranks(2, [&](const Bootstrap& bootstrap) {
            const Context context = make_context(problem, bootstrap, problem.context_options());
            for (const Tail tail : allowed_tails(context, tokens)) {
                Tensor expected = problem.output();
                ASSERT_TRUE(context.layer(0).run(tail, problem.input(bootstrap.rank), expected.writable_rows()).ok());

                Tensor over_shared = problem.shared[static_cast<std::size_t>(bootstrap.rank)];
                TailInput input = problem.input(bootstrap.rank);
                input.shared = over_shared.rows();
                ASSERT_TRUE(context.layer(0).run(tail, input, over_shared.writable_rows()).ok());
                EXPECT_EQ(expected.content(), over_shared.content()) << name(tail) << " over shared";

                Tensor over_prefix = problem.prefix;
                input = problem.input(bootstrap.rank);
                input.prefix = over_prefix.rows();
                ASSERT_TRUE(context.layer(0).run(tail, input, over_prefix.writable_rows()).ok());
                EXPECT_EQ(expected.content(), over_prefix.content()) << name(tail) << " over prefix";
            }
        });
    }
}

TEST(Tails, LeaveTheirInputsAloneUnlessSharedMayBeConsumed) {
    const Problem problem(2, 30);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(problem, bootstrap, problem.context_options());
        const auto rank = static_cast<std::size_t>(bootstrap.rank);
        for (const Tail tail : allowed_tails(context, problem.tokens)) {
            const std::vector<std::byte> routed_before = problem.routed[rank].content();
            const std::vector<std::byte> shared_before = problem.shared[rank].content();
            Tensor out = problem.output();
            ASSERT_TRUE(context.layer(0).run(tail, problem.input(bootstrap.rank), out.writable_rows()).ok());
            EXPECT_EQ(routed_before, problem.routed[rank].content()) << name(tail);
            EXPECT_EQ(shared_before, problem.shared[rank].content()) << name(tail);

            Tensor consumed = problem.shared[rank];
            Tensor out_consuming = problem.output();
            TailInput input = problem.input(bootstrap.rank);
            input.shared = consumed.rows();
            input.consume_shared = true;
            ASSERT_TRUE(context.layer(0).run(tail, input, out_consuming.writable_rows()).ok());
            EXPECT_EQ(out.content(), out_consuming.content()) << name(tail);
        }
    });
}

TEST(Tails, KeepNanInfinityAndOverflowOnTheirOwnRow) {
    Problem problem(2, 6);
    const Problem clean(2, 6);
    const float infinity = std::numeric_limits<float>::infinity();
    problem.routed[0].set(1, 5, std::nanf(""));
    problem.routed[1].set(2, 7, infinity);
    for (std::int64_t column = 0; column < problem.shape.latent; ++column)
        problem.routed[0].set(3, column, 1e30F);  // squares overflow
    problem.shared[1].set(4, 11, -infinity);
    for (std::int64_t column = 0; column < problem.shape.latent; column += 2) {
        problem.routed[0].set(5, column, -0.0F);
        problem.routed[1].set(5, column, -0.0F);
    }
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(problem, bootstrap, problem.context_options());
        for (const Tail tail : allowed_tails(context, problem.tokens)) {
            Tensor out = problem.output();
            Tensor out_clean = problem.output();
            ASSERT_TRUE(context.layer(0).run(tail, problem.input(bootstrap.rank), out.writable_rows()).ok());
            ASSERT_TRUE(context.layer(0).run(tail, clean.input(bootstrap.rank), out_clean.writable_rows()).ok());
            for (std::int64_t row = 0; row < problem.tokens; ++row) {
                for (std::int64_t column = 0; column < problem.shape.hidden; ++column) {
                    const float value = out.at(row, column);
                    const float expected = problem.chain()[static_cast<std::size_t>(row * problem.shape.hidden + column)];
                    ASSERT_EQ(std::isnan(value), std::isnan(expected))
                        << name(tail) << " row " << row << " column " << column;
                    ASSERT_EQ(std::isinf(value), std::isinf(expected))
                        << name(tail) << " row " << row << " column " << column;
                    if (row == 0) {
                        ASSERT_EQ(value, out_clean.at(row, column)) << name(tail) << ": another row was touched";
                    }
                    if (std::isfinite(expected)) {
                        ASSERT_NEAR(value, expected, 0.02 * std::abs(expected) + 0.05) << name(tail) << " row " << row;
                    }
                }
            }
        }
    });
}

TEST(Tails, GiveTheSameBitsWhateverTheTimingOfTheRanks) {
    const Problem problem(3, 70);
    on_ranks(3, [&](const Bootstrap& bootstrap) {
        Options options = problem.context_options();
        options.cpu_threads = 2;
        const Context context = make_context(problem, bootstrap, options);
        std::mt19937 random(static_cast<unsigned>(bootstrap.rank));
        for (const Tail tail : allowed_tails(context, problem.tokens)) {
            std::vector<std::byte> first;
            for (int repeat = 0; repeat < 8; ++repeat) {
                std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
                Tensor out = problem.output();
                ASSERT_TRUE(context.layer(0).run(tail, problem.input(bootstrap.rank), out.writable_rows()).ok());
                if (repeat == 0) first = out.content();
                ASSERT_EQ(first, out.content()) << name(tail);
            }
        }
    });
}

TEST(Tails, DoNotDependOnTheNumberOfWorkerThreads) {
    const Problem problem(2, 140, {.hidden = 1024, .latent = 512});
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        std::vector<std::vector<std::byte>> first;
        for (const int threads : {1, 2, 3}) {
            Options options = problem.context_options();
            options.cpu_threads = threads;
            const Context context = make_context(problem, bootstrap, options);
            std::vector<std::vector<std::byte>> outputs;
            std::vector<Tail> tails = allowed_tails(context, problem.tokens);  // the cheapest first: threads may change that
            std::sort(tails.begin(), tails.end());
            for (const Tail tail : tails) {
                Tensor out = problem.output();
                ASSERT_TRUE(context.layer(0).run(tail, problem.input(bootstrap.rank), out.writable_rows()).ok());
                outputs.push_back(out.content());
            }
            if (first.empty()) first = outputs;
            EXPECT_EQ(first, outputs) << threads << " threads";
        }
    });
}

TEST(Tails, GiveASequenceParallelCallerItsOwnTokens) {
    for (const std::int64_t tokens : {0, 1, 2, 3, 10, 800}) {
        const Problem problem(3, tokens);
        on_ranks(3, [&](const Bootstrap& bootstrap) {
            const Context context = make_context(problem, bootstrap, problem.context_options());
            Tensor whole = problem.output();
            ASSERT_TRUE(
                context.layer(0).run(Tail::token_parallel, problem.input(bootstrap.rank), whole.writable_rows()).ok());

            Options options = problem.context_options();
            options.sequence_parallel = true;
            const Context sharded = make_context(problem, bootstrap, options);
            const TokenRange own = sharded.own_tokens(tokens, bootstrap.rank);
            Tensor part(own.count, problem.shape.hidden, problem.shape.activations);
            TailInput input = problem.input(bootstrap.rank);
            input.prefix = {problem.prefix.matrix().row(own.first), problem.prefix.matrix().stride};
            ASSERT_TRUE(sharded.layer(0).run(input, part.writable_rows()).ok());
            for (std::int64_t row = 0; row < own.count; ++row) {
                for (std::int64_t column = 0; column < problem.shape.hidden; ++column) {
                    ASSERT_EQ(part.at(row, column), whole.at(own.first + row, column)) << row << ", " << column;
                }
            }
        });
    }
}

TEST(Tails, FollowThePlanWhenNoneIsNamed) {
    const Problem problem(2, 5);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(problem, bootstrap, problem.context_options());
        Tensor planned = problem.output();
        Tensor named = problem.output();
        ASSERT_TRUE(context.layer(0).run(problem.input(bootstrap.rank), planned.writable_rows()).ok());
        ASSERT_TRUE(context.layer(0).run(context.plan(5).tail, problem.input(bootstrap.rank), named.writable_rows()).ok());
        EXPECT_EQ(planned.content(), named.content());
    });
}

}  // namespace
}  // namespace latent_moe
