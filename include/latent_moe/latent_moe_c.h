/* The library from C, and from any language that calls C: the stable surface. (`latent_moe/latent_moe.h` is the C++ API;
 * both are in the same shared library.) What a call means is said in the C++ headers, beside the function of the same name.
 *
 * - Handles are opaque. Whoever made one destroys it; a layer belongs to its context and lives as long.
 * - Every function that can fail returns a status; the message is `latent_moe_last_error()`. No exception leaves the
 * library.
 * - A struct begins with `struct_size`. Its `_init` function sets it and every default:
 *
 *       latent_moe_options options;
 *       latent_moe_options_init(&options, sizeof options);
 *
 *   Structs only ever grow at their end, so a program keeps working with a newer library. With an older one it works too, as
 *   long as the fields which that library does not know are zero; else the call is refused.
 * - Threads: as in C++. One host thread at a time may use a context, except `latent_moe_context_poll_fault`,
 *   `latent_moe_context_counters` and `latent_moe_context_abort`. */
#ifndef LATENT_MOE_C_H
#define LATENT_MOE_C_H

#include <stddef.h>
#include <stdint.h>

#define LATENT_MOE_C_API __attribute__((visibility("default")))

/* Changes only when a function or a field changes its meaning, which breaks programs; additions leave it alone. */
#define LATENT_MOE_ABI_VERSION 1

/* NOLINTBEGIN(readability-identifier-naming): C has no namespaces */
#ifdef __cplusplus
extern "C" {
#endif

typedef enum latent_moe_status {
    LATENT_MOE_OK = 0,
    LATENT_MOE_INVALID_ARGUMENT = 1,
    LATENT_MOE_MISMATCH = 2,
    LATENT_MOE_UNSUPPORTED = 3,
    LATENT_MOE_UNAVAILABLE = 4,
    LATENT_MOE_OUT_OF_MEMORY = 5,
    LATENT_MOE_TIMEOUT = 6,
    LATENT_MOE_ABORTED = 7,
    LATENT_MOE_IO = 8,
    LATENT_MOE_INTERNAL = 9
} latent_moe_status;
#define LATENT_MOE_STATUS_COUNT 10

typedef enum latent_moe_dtype {
    LATENT_MOE_BF16 = 0,
    LATENT_MOE_F16 = 1,
    LATENT_MOE_F32 = 2,
    LATENT_MOE_E4M3 = 3 /* weights only */
} latent_moe_dtype;

typedef enum latent_moe_norm { LATENT_MOE_NORM_NONE = 0, LATENT_MOE_NORM_RMS = 1 } latent_moe_norm;

typedef enum latent_moe_tail {
    LATENT_MOE_TAIL_AUTO = -1, /* what the plan chooses */
    LATENT_MOE_TAIL_REPLICATED = 0,
    LATENT_MOE_TAIL_OVERLAP = 1,
    LATENT_MOE_TAIL_COLUMN_PARALLEL = 2,
    LATENT_MOE_TAIL_TOKEN_PARALLEL = 3,
    LATENT_MOE_TAIL_LATE_REDUCE = 4,
    LATENT_MOE_TAIL_FUSED = 5
} latent_moe_tail;
#define LATENT_MOE_TAIL_COUNT 6

typedef enum latent_moe_shared_state {
    LATENT_MOE_SHARED_PARTIAL = 0,
    LATENT_MOE_SHARED_REDUCED = 1,
    LATENT_MOE_SHARED_ABSENT = 2
} latent_moe_shared_state;

typedef struct latent_moe_bootstrap latent_moe_bootstrap;
typedef struct latent_moe_context latent_moe_context;
typedef struct latent_moe_layer latent_moe_layer;
typedef struct latent_moe_plan latent_moe_plan;

/* The library. */

/* LATENT_MOE_ABI_VERSION as the library was built with it: a program checks that it is its own. */
LATENT_MOE_C_API int32_t latent_moe_abi_version(void);
LATENT_MOE_C_API const char* latent_moe_version(void);
/* One line about the last call of this thread that failed; valid until its next call. Never null. */
LATENT_MOE_C_API const char* latent_moe_last_error(void);
LATENT_MOE_C_API const char* latent_moe_status_name(int32_t status);
LATENT_MOE_C_API const char* latent_moe_tail_name(int32_t tail);

/* The shape. */

typedef struct latent_moe_shape {
    size_t struct_size;
    int64_t hidden;
    int64_t latent;
    int32_t norm; /* latent_moe_norm */
    float epsilon;
    float routed_scale;
    int32_t activations; /* latent_moe_dtype */
} latent_moe_shape;

LATENT_MOE_C_API latent_moe_status latent_moe_shape_init(latent_moe_shape* shape, size_t struct_size);
/* `kimi-k3`, `nemotron-3-super` or `nemotron-3-ultra`. */
LATENT_MOE_C_API latent_moe_status latent_moe_shape_preset(const char* model, latent_moe_shape* shape, size_t struct_size);

/* The ranks. */

/* Gathers `bytes` bytes of every rank, in rank order, into `received` (world * bytes) on every rank; 0 when done, else any
 * number, which ends in the error. Called by the thread that calls into the library. */
typedef int (*latent_moe_all_gather)(void* user, const void* send, void* received, size_t bytes);

/* Ranks that find each other by the caller's own means. `user` is passed on and must live as long as the contexts do. */
LATENT_MOE_C_API latent_moe_status latent_moe_bootstrap_create(int32_t rank, int32_t world, int32_t local_world,
                                                               latent_moe_all_gather all_gather, void* user,
                                                               latent_moe_bootstrap** bootstrap);
/* `world` ranks, each for a thread of its own in this process: `bootstraps[r]` is rank r's. */
LATENT_MOE_C_API latent_moe_status latent_moe_bootstrap_threads(int32_t world, int32_t timeout_ms,
                                                                latent_moe_bootstrap** bootstraps);
/* The ranks of an `ncclComm_t`, which is duplicated; collective over it. */
LATENT_MOE_C_API latent_moe_status latent_moe_bootstrap_nccl(void* communicator, int32_t timeout_ms,
                                                             latent_moe_bootstrap** bootstrap);
/* At any time after the contexts were created: they keep what they need. Null is ignored. */
LATENT_MOE_C_API void latent_moe_bootstrap_destroy(latent_moe_bootstrap* bootstrap);

/* The context. */

typedef struct latent_moe_options {
    size_t struct_size;
    const char* backend; /* "auto", "cpu", … ; null: "auto" */
    int64_t capacity_tokens;
    int64_t max_tokens;
    int32_t timeout_ms;
    int32_t keep_whole_weights; /* a truth value, like the others below that are no numbers */
    int32_t tail;               /* latent_moe_tail; LATENT_MOE_TAIL_AUTO: any */
    int32_t shared;             /* latent_moe_shared_state */
    int64_t tail_token_limit[LATENT_MOE_TAIL_COUNT];
    int32_t sequence_parallel;
    int32_t expert_parallel;
    int32_t cpu_threads;
    int32_t device;
    int32_t reserved_sms;
    int32_t deferred_finalize;
    int32_t batch_invariant;
    int32_t float8_weights;
    int64_t self_check_period;
    const char* self_check_folder; /* null: the current folder */
    const char*
        tune_table; /* a file that `latent-moe tune` wrote, "auto": a shipped table that fits, "none"; null: "auto" */
} latent_moe_options;

LATENT_MOE_C_API latent_moe_status latent_moe_options_init(latent_moe_options* options, size_t struct_size);

typedef struct latent_moe_weights {
    size_t struct_size;
    const void* data;
    int64_t rows; /* all `hidden`, or this rank's shard */
    int64_t stride;
    int32_t dtype; /* latent_moe_dtype */
    float scale;
    const float* row_scales; /* one a row, or null; host memory */
} latent_moe_weights;

LATENT_MOE_C_API latent_moe_status latent_moe_weights_init(latent_moe_weights* weights, size_t struct_size);

/* Collective. */
LATENT_MOE_C_API latent_moe_status latent_moe_context_create(const latent_moe_shape* shape,
                                                             const latent_moe_bootstrap* bootstrap,
                                                             const latent_moe_options* options,
                                                             latent_moe_context** context);
/* Null is ignored. */
LATENT_MOE_C_API void latent_moe_context_destroy(latent_moe_context* context);
/* `gamma`: `latent` elements of the activation dtype, null without a norm. `layer` may be null. */
LATENT_MOE_C_API latent_moe_status latent_moe_context_add_layer(latent_moe_context* context, int64_t id,
                                                                const latent_moe_weights* weights, const void* gamma,
                                                                const latent_moe_layer** layer);
/* Collective. */
LATENT_MOE_C_API latent_moe_status latent_moe_context_seal(latent_moe_context* context);

LATENT_MOE_C_API int32_t latent_moe_context_rank(const latent_moe_context* context);
LATENT_MOE_C_API int32_t latent_moe_context_world(const latent_moe_context* context);
LATENT_MOE_C_API const char* latent_moe_context_backend(const latent_moe_context* context);
LATENT_MOE_C_API size_t latent_moe_context_weight_bytes(const latent_moe_context* context);
LATENT_MOE_C_API size_t latent_moe_context_workspace_bytes(const latent_moe_context* context);
/* The rows of the output that `rank` owns where it is sharded by tokens. */
LATENT_MOE_C_API latent_moe_status latent_moe_context_own_tokens(const latent_moe_context* context, int64_t tokens,
                                                                 int32_t rank, int64_t* first, int64_t* count);

typedef struct latent_moe_fault {
    size_t struct_size;
    int32_t present; /* 0: all is well, and the rest means nothing */
    int32_t rank;
    int64_t layer;
    uint64_t call;
    const char* phase; /* both valid until this thread's next poll */
    const char* message;
} latent_moe_fault;

/* `fault->struct_size` is set by the caller. Any thread. */
LATENT_MOE_C_API latent_moe_status latent_moe_context_poll_fault(const latent_moe_context* context, latent_moe_fault* fault);
typedef struct latent_moe_counters {
    size_t struct_size;
    uint64_t calls[LATENT_MOE_TAIL_COUNT]; /* made, by latent_moe_tail */
    uint64_t parts;
    uint64_t refused[LATENT_MOE_STATUS_COUNT]; /* by latent_moe_status */
    uint64_t failed[LATENT_MOE_STATUS_COUNT];
    uint64_t waits;
    uint64_t wait_us;
    uint64_t longest_wait_us;
    uint64_t self_checks;
} latent_moe_counters;

/* `counters->struct_size` is set by the caller. Any thread. */
LATENT_MOE_C_API latent_moe_status latent_moe_context_counters(const latent_moe_context* context,
                                                               latent_moe_counters* counters);
/* Any thread. `reason` may be null. */
LATENT_MOE_C_API latent_moe_status latent_moe_context_abort(latent_moe_context* context, const char* reason);
/* Collective, both. */
LATENT_MOE_C_API latent_moe_status latent_moe_context_suspend(latent_moe_context* context);
LATENT_MOE_C_API latent_moe_status latent_moe_context_resume(latent_moe_context* context);

/* The plan: which tail would run so many tokens, and why not the others. */

LATENT_MOE_C_API latent_moe_status latent_moe_context_plan(const latent_moe_context* context, int64_t tokens,
                                                           latent_moe_plan** plan);
LATENT_MOE_C_API void latent_moe_plan_destroy(latent_moe_plan* plan);
/* LATENT_MOE_TAIL_AUTO where no tail can run. */
LATENT_MOE_C_API latent_moe_tail latent_moe_plan_tail(const latent_moe_plan* plan);
LATENT_MOE_C_API const char* latent_moe_plan_source(const latent_moe_plan* plan);
/* Cheapest first. The accessors below fail for an index that is not there. */
LATENT_MOE_C_API size_t latent_moe_plan_candidates(const latent_moe_plan* plan);
LATENT_MOE_C_API latent_moe_status latent_moe_plan_candidate(const latent_moe_plan* plan, size_t index,
                                                             latent_moe_tail* tail, double* expected_us);
LATENT_MOE_C_API size_t latent_moe_plan_refusals(const latent_moe_plan* plan);
LATENT_MOE_C_API latent_moe_status latent_moe_plan_refusal(const latent_moe_plan* plan, size_t index, latent_moe_tail* tail,
                                                           const char** reason);

/* The calls. They enqueue on `stream` (null on the CPU, where work is done when a call returns). */

/* Rows of a tensor; `stride` counts elements, 0: contiguous. */
typedef struct latent_moe_rows {
    const void* data;
    int64_t stride;
} latent_moe_rows;

/* The experts' un-combined rows, in place of `routed`, in a context with `deferred_finalize`. */
typedef struct latent_moe_deferred_rows {
    latent_moe_rows rows; /* [count, latent] */
    int64_t count;
    int64_t slots;
    const void* weights;  /* [tokens, slots] */
    int32_t weight_dtype; /* bf16 or f32 */
    const int32_t* map;   /* [tokens, slots]; below 0 drops the slot */
} latent_moe_deferred_rows;

typedef struct latent_moe_input {
    size_t struct_size;
    latent_moe_rows routed;
    latent_moe_rows shared;
    latent_moe_rows prefix;
    int64_t tokens;
    int32_t consume_shared;
    int32_t starts_early;
    int32_t releases_early;
    latent_moe_deferred_rows deferred; /* slots 0: none */
} latent_moe_input;

LATENT_MOE_C_API latent_moe_status latent_moe_input_init(latent_moe_input* input, size_t struct_size);

/* One tail. `tail` is a latent_moe_tail; LATENT_MOE_TAIL_AUTO: what the plan chooses. */
LATENT_MOE_C_API latent_moe_status latent_moe_layer_run(const latent_moe_layer* layer, int32_t tail,
                                                        const latent_moe_input* input, void* out, int64_t out_stride,
                                                        void* stream);

/* The same call in two halves, so that the shared rows travel while the routed experts still compute. Between them the
 * context takes no other call. */

/* Enqueues the reduction of `shared` for a call of `tokens` rows into `out`, which holds what was reduced until `finish`.
 * `tail`: LATENT_MOE_TAIL_AUTO, replicated, column_parallel or token_parallel. */
LATENT_MOE_C_API latent_moe_status latent_moe_layer_begin(const latent_moe_layer* layer, int32_t tail,
                                                          latent_moe_rows shared, int64_t tokens, void* out,
                                                          int64_t out_stride, void* stream);
/* Enqueues the rest, on the same stream or another. `prefix.data` null: none; it may not overlap `out`. */
LATENT_MOE_C_API latent_moe_status latent_moe_layer_finish(const latent_moe_layer* layer, latent_moe_rows routed,
                                                           latent_moe_rows prefix, void* stream);
LATENT_MOE_C_API int64_t latent_moe_layer_id(const latent_moe_layer* layer);

/* The tail's parts as operations of their own. */
LATENT_MOE_C_API latent_moe_status latent_moe_all_reduce_rms_norm(latent_moe_context* context, latent_moe_rows x,
                                                                  const void* gamma, void* y, int64_t y_stride,
                                                                  int64_t tokens, void* stream);
LATENT_MOE_C_API latent_moe_status latent_moe_accumulate_projection(latent_moe_context* context, latent_moe_rows a,
                                                                    const latent_moe_layer* layer, void* c_slice,
                                                                    int64_t c_stride, int64_t tokens, void* stream);

#ifdef __cplusplus
}
#endif
/* NOLINTEND(readability-identifier-naming) */

#endif
