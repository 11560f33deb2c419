// How a context is set up. Every field but `tune_table` and `device` is compared between the ranks at creation; a difference
// is an error on all of them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "latent_moe/plan.h"

namespace latent_moe {

struct Options {
    std::string backend = "auto";  ///< "cpu", a GPU backend that this build has, or "auto": the GPU if there is one
    std::int64_t capacity_tokens =
        128;                          ///< most tokens of a call of the fused tail (its mailboxes are sized by it); 0: none
    std::int64_t max_tokens = 8192;   ///< most tokens of any call; at most `max_tokens_limit`
    int timeout_ms = 30'000;          ///< a peer that has not arrived by then is reported as the error `timeout`. During
                                      ///< creation, and for CPU calls over an all-gather of the caller's, that one's own
                                      ///< timeout counts
    bool keep_whole_weights = false;  ///< keep the whole W_up on every rank: what every tail but `column_parallel` and
                                      ///< `fused` needs when there are several ranks, at `world` times the bytes
    std::optional<Tail> tail = {};    ///< run only this tail; creation fails if it can run for no number of tokens
    std::array<std::int64_t, tail_count> tail_token_limit =
        no_limits();  ///< by `Tail`: most tokens for which it may be chosen
    std::string tune_table =
        "auto";  ///< measured times that the plan goes by: a file that `latent-moe tune` wrote, "auto": a
                 ///< table that is shipped and fits, or "none". Rank 0's counts; the others' is not read.
                 ///< A broken file is an error; where none fits the cost model plans, and the plan says so

    SharedState shared = SharedState::partial;  ///< what the caller's shared rows are, for every call of the context
    bool sequence_parallel = false;  ///< the caller wants only its own rows of the output (see `Context::own_tokens`)
    bool expert_parallel = false;  ///< the ranks are an expert-parallel group: they split experts, not columns, so `shared`
                                   ///< is usually already reduced. The bootstrap is that of the group that is summed over

    bool deferred_finalize = false;  ///< calls may hand over `DeferredRows`: room for `max_tokens` combined rows is kept
    bool batch_invariant = false;    ///< a row's bits depend neither on the number of tokens nor on its neighbours. One tail
                                     ///< runs every call (`tail`, or the plan's choice), and products go slower: see
                                     ///< docs/numerics.md for the price. On GPUs `fused` cannot run then, and
                                     ///< `other_reducer_from_bytes` is refused where ranks have a peer window
    bool float8_weights = false;     ///< round W_up to e4m3 with a scale a row, whatever is given. Half the bytes of bf16 on
                                     ///< the CPU; a GPU keeps it widened

    // Where an engine has reducers beside this library's.
    bool custom_all_reduce = true;  ///< false: the engine has custom all-reduces switched off, so nothing here exchanges
                                    ///< through peer memory either; the vendor's collectives do all of it
    std::int64_t other_reducer_from_bytes = INT64_MAX;  ///< summands of this size on are another reducer's, which takes
                                                        ///< precedence: no tail with a reducer of its own runs for them
    bool captured = false;  ///< the calls will be captured in graphs: only what is known to survive that is chosen

    int cpu_threads = 0;    ///< CPU backend: worker threads of this rank; 0: the machine's cores shared among local ranks
    int device = -1;        ///< GPU backend: the device of this rank; -1: rank modulo the number of devices
    int reserved_sms = 16;  ///< GPU backend: multiprocessors that kernels which wait for peers leave to others

    std::int64_t self_check_period = 0;  ///< one call in so many of each layer is checked against the unfused chain, and the
                                         ///< layer's packed weights against their checksum; 0: none (docs/reliability.md)
    std::string self_check_folder =
        {};  ///< where the inputs of a mismatch are saved; empty: the current folder. Not compared

    static constexpr std::array<std::int64_t, tail_count> no_limits() {
        std::array<std::int64_t, tail_count> limits{};
        limits.fill(INT64_MAX);
        return limits;
    }
};

}  // namespace latent_moe
