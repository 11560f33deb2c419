// `info --measure`: the constants of core/machine.h, from what the tail's own public parts take here.
//
// Cold products of few tokens with a wide and a narrow W_up: what the wider one takes longer is memory, what is left of the
// narrow one is the launch. A product of many tokens: arithmetic. All-reduce + norm of one token: the hops there and back;
// of many: the wire. What cannot be told (no peers, peers on the same device, noise) stays as the backend assumes it, by
// name.
#pragma once

#include "cli/output.h"
#include "cli/problem.h"
#include "core/machine_kind.h"

namespace latent_moe::cli {

/// What was timed, µs.
struct MachineTimes {
    double wide_us = 0;    ///< product of one token, all of a rank's rows
    double narrow_us = 0;  ///< the same with fewer rows
    double large_us = 0;   ///< product of many tokens, all rows
    double few_us = 0;     ///< all-reduce + norm of one token; 0 where there is nothing to measure
    double many_us = 0;    ///< of many
};

/// What the times are of.
struct MachineProbes {
    Shape shape;
    int world = 1;
    std::int64_t narrow_hidden = 0;
    std::int64_t large_tokens = 0;
    std::int64_t many_tokens = 0;
    double weight_element_bytes = 2;
};

struct MeasuredMachine {
    MachineKind kind;
    MachineTimes times;
    MachineProbes probes;
};

/// `assumed` with every constant that the times tell, and the names of the others.
MachineKind machine_from(const MachineTimes& times, const MachineProbes& probes, const MachineKind& assumed);

/// Collective.
MeasuredMachine measure_machine(const Arguments& arguments, const Problem& problem, const Bootstrap& bootstrap,
                                Progress& progress);

}  // namespace latent_moe::cli
