/* One tail from plain C: two ranks as threads, one layer; the result is compared with plain loops. */
#include <latent_moe/latent_moe_c.h>

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { world = 2, hidden = 256, latent = 64, tokens = 3 };

/* float32 keeps the example short; models use bf16. Every rank may be given the whole W_up. */
static float up_projection[hidden * latent];
static float gamma_values[latent];
static float routed[world][tokens * latent]; /* each rank's summands */
static float shared[world][tokens * hidden];
static float out[world][tokens * hidden];

static void fill(float* values, size_t count, unsigned seed) {
    for (size_t i = 0; i < count; ++i) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
}

static int check(latent_moe_status status, const char* what) {
    if (status == LATENT_MOE_OK) return 1;
    fprintf(stderr, "%s: %s: %s\n", what, latent_moe_status_name(status), latent_moe_last_error());
    return 0;
}

/* What a rank does, in the order in which every rank does it. */
static int run_rank(latent_moe_bootstrap* bootstrap) {
    latent_moe_shape shape;
    latent_moe_shape_init(&shape, sizeof shape);
    shape.hidden = hidden;
    shape.latent = latent;
    shape.activations = LATENT_MOE_F32;

    latent_moe_options options;
    latent_moe_options_init(&options, sizeof options);
    options.backend = "cpu";
    options.max_tokens = 64;

    latent_moe_context* context = NULL;
    if (!check(latent_moe_context_create(&shape, bootstrap, &options, &context), "create")) return 0;
    const int rank = latent_moe_context_rank(context);

    latent_moe_weights weights;
    latent_moe_weights_init(&weights, sizeof weights);
    weights.data = up_projection;
    weights.rows = hidden;
    weights.dtype = LATENT_MOE_F32;
    const latent_moe_layer* layer = NULL;

    latent_moe_input input;
    latent_moe_input_init(&input, sizeof input);
    input.routed.data = routed[rank];
    input.shared.data = shared[rank];
    input.tokens = tokens;

    const int done = check(latent_moe_context_add_layer(context, 0, &weights, gamma_values, &layer), "add_layer") &&
                     check(latent_moe_context_seal(context), "seal") &&
                     check(latent_moe_layer_run(layer, LATENT_MOE_TAIL_AUTO, &input, out[rank], 0, NULL), "run");
    if (done && rank == 0) {
        latent_moe_plan* plan = NULL;
        if (check(latent_moe_context_plan(context, tokens, &plan), "plan"))
            printf("tail %s on %d ranks", latent_moe_tail_name(latent_moe_plan_tail(plan)), world);
        latent_moe_plan_destroy(plan);
    }
    latent_moe_context_destroy(context);
    return done;
}

static void* rank_thread(void* bootstrap) {
    return run_rank((latent_moe_bootstrap*)bootstrap) ? bootstrap : NULL;
}

/* The formula, in double. */
static double expected(int token, int column) {
    double sums[latent];
    double squares = 0;
    for (int k = 0; k < latent; ++k) {
        sums[k] = 0;
        for (int rank = 0; rank < world; ++rank) sums[k] += (double)routed[rank][token * latent + k];
        squares += sums[k] * sums[k];
    }
    const double scale = 1 / sqrt(squares / latent + 1e-5);
    double value = 0;
    for (int k = 0; k < latent; ++k)
        value += sums[k] * scale * (double)gamma_values[k] * (double)up_projection[column * latent + k];
    for (int rank = 0; rank < world; ++rank) value += (double)shared[rank][token * hidden + column];
    return value;
}

int main(void) {
    if (latent_moe_abi_version() != LATENT_MOE_ABI_VERSION) {
        fprintf(stderr, "the library has ABI %d, this program expects %d\n", latent_moe_abi_version(), LATENT_MOE_ABI_VERSION);
        return 1;
    }
    fill(up_projection, sizeof up_projection / sizeof(float), 1);
    for (int k = 0; k < latent; ++k) gamma_values[k] = 1;
    for (unsigned rank = 0; rank < world; ++rank) {
        fill(routed[rank], sizeof routed[rank] / sizeof(float), 10 + rank);
        fill(shared[rank], sizeof shared[rank] / sizeof(float), 20 + rank);
    }

    latent_moe_bootstrap* bootstraps[world];
    if (!check(latent_moe_bootstrap_threads(world, 30000, bootstraps), "ranks")) return 1;
    pthread_t threads[world];
    for (int rank = 0; rank < world; ++rank) pthread_create(&threads[rank], NULL, &rank_thread, bootstraps[rank]);
    int failed = 0;
    for (int rank = 0; rank < world; ++rank) {
        void* done = NULL;
        pthread_join(threads[rank], &done);
        failed |= done == NULL;
        latent_moe_bootstrap_destroy(bootstraps[rank]);
    }
    if (failed) return 1;

    double worst = 0;
    for (int token = 0; token < tokens; ++token) {
        for (int column = 0; column < hidden; ++column) {
            for (int rank = 0; rank < world; ++rank)
                worst = fmax(worst, fabs((double)out[rank][token * hidden + column] - expected(token, column)));
        }
    }
    printf(": largest error %.1e\n", worst);
    return worst < 1e-4 ? 0 : 1;
}
